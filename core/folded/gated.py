"""Trinity (AFMoE): what attention gives is multiplied by gates, one for each channel, before its last matrix."""

from __future__ import annotations

from penjing.core.errors import InputError
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

_TRINITY = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
    "self_attn.g_proj": "self_attn.gate_proj",
    "mlp.gate": "mlp.router.gate",
    "mlp.e_score_correction_bias": "mlp.expert_bias",
}
"""Module of ours in a layer → its name in a folder."""
_LARGEST = 1_000_000  # of a width


def _afmoe(values: Values, source: str) -> Fold:
    """Layers that see all do not rotate. Experts are chosen as DeepSeek-V3's, without groups."""
    for name, known in (("score_func", "sigmoid"), ("route_norm", True), ("num_expert_groups", 1), ("n_group", 1)):
        if values.get(name, known) != known:
            raise InputError(f"{source}: {name}={values[name]!r} is not supported; {known!r} is")
    sliding = sliding_of(values, source, values["global_attn_every_n_layers"])
    inner = count_of(values, "moe_intermediate_size", source, most=_LARGEST)
    moe = {
        "num_experts": count_of(values, "num_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * count_of(values, "num_shared_experts", source),
        "scoring_func": "sigmoid",
        "router_bias": True,
        "routed_scaling_factor": number_of(values, "route_scale", source),
        "mlp_only_layers": dense_of(values, source, whole_of(values, "num_dense_layers", source)),
    }
    rotary = ["main" if kind == "sliding_attention" else "none" for kind in sliding["layer_types"]]
    changes: Values = {"norms": "around", "qk_norm": True, "attention_gate": "channel", "layer_rotary": rotary}
    config = config_of(values, source, moe=moe, **changes, **sliding)
    grown = config.hidden_size**0.5 if flag_of(values, "mup_enabled", source) else 1.0
    return Fold(config, _TRINITY, embedding=grown, final=1 / grown if config.tie_word_embeddings else 1.0)


# What transformers assumes when a config.json leaves the field out.
GATED: dict[str, Family] = {
    "afmoe": Family(
        _afmoe,
        {
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 32,
            "num_dense_layers": 1,
            "num_attention_heads": 16,
            "head_dim": 128,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "route_scale": 1.0,
            "global_attn_every_n_layers": 4,
            "sliding_window": 1024,
            "mup_enabled": False,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
}
