"""Trinity (AFMoE) and Laguna: what attention gives is multiplied by gates before its last matrix, one for each channel
or for each head."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import refuse
from penjing.core.folded.fold import (
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    dense_of,
    flag_of,
    number_of,
    ropes_of,
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
_BIAS = "mlp.e_score_correction_bias"
# As published, and as transformers 5 has them.
_LAGUNA = {_BIAS: ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias")} | {
    f"mlp.shared_experts.{part}_proj": (f"mlp.shared_expert.{part}_proj", f"mlp.shared_experts.{part}_proj")
    for part in ("gate", "up", "down")
}
_GATINGS = {True: "head", "per-head": "head", "per-element": "channel"}
_LAGUNA_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
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


def _laguna(values: Values, source: str) -> Fold:
    """Layers may differ in their heads of queries, and those that see all rotate a part of their dimensions."""
    refuse(values, source, "moe_router_logit_softcapping", "moe_apply_router_weight_on_input")
    if values.get("norm_topk_prob", True) is not True:
        raise InputError(f"{source}: norm_topk_prob={values['norm_topk_prob']!r} is not supported; True is")
    gating = values["gating"]
    if not isinstance(gating, bool | str) or gating not in _GATINGS:
        raise InputError(f"{source}: gating={gating!r} is not supported; True, 'per-head' and 'per-element' are")
    each = "per_element" if _GATINGS[gating] == "channel" else "per_head"
    kinds = values.get("gating_types", [each])  # as some folders have it beside
    if not isinstance(kinds, list) or any(str(kind).replace("-", "_") != each for kind in kinds):
        raise InputError(f"{source}: gating_types={kinds!r:.80} is not supported beside gating={gating!r}")
    sliding = sliding_of(values, source, 1)
    heads = _heads(values, source)
    rope, changes = _rotary(values, source, sliding["layer_types"])
    moe = {
        "num_experts": count_of(values, "num_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": count_of(values, "moe_intermediate_size", source, most=_LARGEST),
        "shared_expert_intermediate_size": count_of(values, "shared_expert_intermediate_size", source, most=_LARGEST),
        "scoring_func": "sigmoid",
        "router_bias": True,
        "routed_scaling_factor": number_of(values, "moe_routed_scaling_factor", source),
        "mlp_only_layers": dense_of(values, source, 1),
    }
    changes |= {"attention_gate": _GATINGS[gating], "attention_gate_function": "softplus", "qk_norm": True}
    config = config_of(values | {"num_attention_heads": max(heads)}, source, rope, moe=moe, **changes, **sliding)
    rotary = 0 if config.rotary_pairs is None else 2 * config.rotary_pairs
    fewer = heads if min(heads) < max(heads) else ()
    return Fold(config, rotary=rotary, heads=fewer, spelled=_LAGUNA)


def _heads(values: Values, source: str) -> tuple[int, ...]:
    """Heads of queries in each layer."""
    layers = count_of(values, "num_hidden_layers", source)
    found = values.get("num_attention_heads_per_layer")
    found = [values.get("num_attention_heads")] * layers if found is None else found
    if not isinstance(found, list) or len(found) != layers:
        raise InputError(f"{source}: num_attention_heads_per_layer must have a number for each of {layers} layers")
    heads = tuple(count_of({"num_attention_heads": each}, "num_attention_heads", source) for each in found)
    shared = count_of(values, "num_key_value_heads", source)
    if any(each % shared for each in heads):
        raise InputError(f"{source}: num_attention_heads={heads} are no multiples of num_key_value_heads={shared}")
    return heads


def _rotary(values: Values, source: str, types: list[str]) -> tuple[Values, Values]:
    """Rotary settings of layers that see all as Llama spells them, and what else follows for `types` of layers."""
    if "rope_parameters" not in values:
        refuse(values, source, "rope_scaling", "rope_theta", "partial_rotary_factor")
    sections = values.get("rope_parameters", _LAGUNA_ROPES)
    if not isinstance(sections, dict) or not all(isinstance(sections.get(kind), dict) for kind in types):
        raise InputError(f"{source}: rope_parameters must have rotary settings for each kind of layer")
    whole = dict(sections["full_attention"]) if "full_attention" in types else {"rope_theta": 1e4}
    share = number_of({"partial_rotary_factor": 1.0} | whole, "partial_rotary_factor", source)
    near = sections["sliding_attention"] if "sliding_attention" in types else {"rope_theta": 1e4}
    for section in (whole, near):
        number_of(section, "rope_theta", source)
    plain = {"full_attention": whole | {"partial_rotary_factor": 1.0}, "sliding_attention": near}
    rope, local = ropes_of({"rope_parameters": plain}, source, 1.0, 1.0)
    size = count_of(values, "head_dim", source)
    rotary = int(size * share)
    if rotary < 2 or rotary % 2 or rotary > size:
        raise InputError(f"{source}: partial_rotary_factor {share:g} of {size} dimensions is no even number")
    changes: Values = {} if rotary == size else {"rotary_pairs": rotary // 2}
    if "sliding_attention" in types:
        changes["layer_rotary"] = ["local" if kind == "sliding_attention" else "main" for kind in types]
        changes |= {"rope_local_theta": local, "rotary_local_pairs": size // 2 if changes.get("rotary_pairs") else None}
    return rope, changes


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
    "laguna": Family(
        _laguna,
        {
            "vocab_size": 100352,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "moe_routed_scaling_factor": 1.0,
            "sliding_window": 512,
            "gating": True,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
}
