"""Cohere's Command R and what came after it, with experts: attention and MLP read one norm, which mostly subtracts the
mean, and since Command R7B layers that see all do not rotate."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import ONE_NORM, centred, refuse, with_eps
from penjing.core.folded.fold import (
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    dense_of,
    flag_of,
    number_of,
    sliding_of,
    whole_of,
)

_WAYS = {"sum": 1.0, "average": 0.5}  # what experts add, and the MLP that all tokens take, is multiplied by


def _cohere(values: Values, source: str) -> Fold:
    refuse(values, source, "use_qk_norm")
    changes: Values = {}
    if values["model_type"] == "cohere2":
        changes |= sliding_of(values, source, values.get("sliding_window_pattern", 4))
        changes["layer_rotary"] = ["none" if kind == "full_attention" else "main" for kind in changes["layer_types"]]
    return _parallel(values | {"rms_norm_eps": None}, source, changes)


def _cohere2_moe(values: Values, source: str) -> Fold:
    layers, first = count_of(values, "num_hidden_layers", source), whole_of(values, "first_k_dense_replace", source)
    prefix = count_of(values, "prefix_dense_sliding_window_pattern", source)
    pattern = count_of(values, "sliding_window_pattern", source)
    before = [(layer + 1) % prefix for layer in range(min(first, layers))]
    near = before + [(layer + 1) % pattern for layer in range(layers - len(before))]
    types = ["sliding_attention" if each else "full_attention" for each in near]
    sliding = sliding_of({"layer_types": types} | values, source, 0)
    dense = dense_of(values, source, first)
    rotates = [
        kind == "sliding_attention" or (prefix == 1 and layer in dense)
        for layer, kind in enumerate(sliding["layer_types"])
    ]
    changes = sliding | {"layer_rotary": ["main" if each else "none" for each in rotates]}
    inner, shared = whole_of(values, "intermediate_size", source), whole_of(values, "num_shared_experts", source)
    scoring = values["expert_selection_fn"]
    changes["moe"] = {
        "num_experts": count_of(values, "num_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": inner,
        "scoring_func": scoring,
        "norm_topk_prob": scoring == "softmax" or flag_of(values, "norm_topk_prob", source),
        "shared_expert_intermediate_size": shared * inner,
        "mlp_only_layers": dense,
    }
    way = values["shared_expert_combination_strategy"]
    if not isinstance(way, str) or way not in _WAYS:
        raise InputError(f"{source}: shared_expert_combination_strategy={way!r} is not supported; sum and average are")
    if dense:
        values = values | {"intermediate_size": whole_of(values, "prefix_dense_intermediate_size", source)}
    return _parallel(values, source, changes, _WAYS[way] if shared else 1.0)


def _parallel(values: Values, source: str, changes: Values, experts: float = 1.0) -> Fold:
    """The norm subtracts the mean unless it is one of RMS, whose `rms_norm_eps` is then given."""
    bias = ("qkv", "out") if flag_of(values, "attention_bias", source) else ()
    how: Values = {}
    if values.get("rms_norm_eps") is None:
        fields, how = centred(values, source, "norm", *bias)
        changes, values = fields | changes, with_eps(values, "layer_norm_eps")
    config = config_of(values, source, **changes, parallel=True)
    final = number_of(values, "logit_scale", source)
    return Fold(config, ONE_NORM, final=final, experts=experts, interleaved=True, **how)


_USUAL: Values = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "rope_theta": 10000.0,
}
# What transformers assumes when a config.json leaves the field out.
COHERES: dict[str, Family] = {
    "cohere": Family(_cohere, _USUAL | {"rope_theta": 500000.0}),
    "cohere2": Family(_cohere, _USUAL | {"sliding_window": 4096}),
    "cohere2_moe": Family(
        _cohere2_moe,
        _USUAL
        | {
            "head_dim": 128,
            "sliding_window": 4096,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "shared_expert_combination_strategy": "average",
            "expert_selection_fn": "softmax",
            "first_k_dense_replace": 0,
            "prefix_dense_sliding_window_pattern": 1,
            "norm_topk_prob": True,
            "sliding_window_pattern": 4,
        },
    ),
}
