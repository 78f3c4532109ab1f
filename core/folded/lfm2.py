"""LFM2, dense and with experts, and LFM3: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import refuse
from penjing.core.folded.fold import (
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    flag_of,
    number_of,
    ropes_of,
    whole_of,
)

NAMES = {
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "conv.taps": "conv.conv",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
"""Module of ours in a layer → its name in a folder."""
_ROUTED = {"mlp.gate": "feed_forward.gate", "mlp.e_score_correction_bias": "feed_forward.expert_bias"}
# As published, and as transformers 5 has them.
_EXPERTS = {
    f"mlp.experts.*.{ours}": (f"feed_forward.experts.*.{theirs}", f"feed_forward.experts.*.{ours}")
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
}
LFM3_NAMES = {
    **{ours: theirs for ours, theirs in NAMES.items() if not ours.startswith("self_attn.")},
    "attention_output_norm": "post_operator_norm",
    "mlp_output_norm": "post_ffn_norm",
}
_OUTSIDE = {"model.norm": "model.embedding_norm"}
_LARGEST = 1_000_000  # of a width


def _lfm2(values: Values, source: str) -> Fold:
    # What the first folders call a field counts before the name that others have.
    named = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    values = values | {ours: values[theirs] for theirs, ours in named.items() if theirs in values}
    values = values | {"intermediate_size": _inner(values, source)}
    return Fold(config_of(values, source, qk_norm=True, **_layers(values, source)), NAMES, dict(_OUTSIDE))


def _lfm2_moe(values: Values, source: str) -> Fold:
    values = values | ({"tie_word_embeddings": values["tie_embedding"]} if "tie_embedding" in values else {})
    layers = count_of(values, "num_hidden_layers", source)
    moe = {
        "num_experts": count_of(values, "num_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": count_of(values, "moe_intermediate_size", source, most=_LARGEST),
        "scoring_func": "sigmoid",
        "router_bias": flag_of(values, "use_expert_bias", source),
        "norm_topk_prob": flag_of(values, "norm_topk_prob", source),
        "routed_scaling_factor": number_of(values, "routed_scaling_factor", source),
        "mlp_only_layers": list(range(min(whole_of(values, "num_dense_layers", source), layers))),
    }
    config = config_of(values, source, qk_norm=True, moe=moe, **_layers(values, source))
    return Fold(config, NAMES | _ROUTED, dict(_OUTSIDE), spelled=_EXPERTS)


def _lfm3(values: Values, source: str) -> Fold:
    """What attention gives has a gate for each head; layers that slide rotate by a base of their own."""
    layers = count_of(values, "num_hidden_layers", source)
    usual = {2: "full_attention", 0: "sliding_attention"}
    types = values.get("layer_types", [usual.get(layer % 4 if layer else 1, "conv") for layer in range(layers)])
    known = ("conv", "full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(each not in known for each in types):
        raise InputError(f"{source}: layer_types must name {', '.join(known)} for {layers} layers")
    changes = _layers(
        values | {"layer_types": ["conv" if each == "conv" else "full_attention" for each in types]}, source
    )
    slides = "sliding_attention" in types
    rope, local, pairs = _rotary_of_lfm3(values, source, slides)
    changes |= pairs | {
        "layer_types": ["short_conv" if each == "conv" else each for each in types],
        "sliding_window": count_of(values, "sliding_window", source, most=_LARGEST) if slides else None,
        "layer_rotary": ["local" if each == "sliding_attention" else "main" for each in types] if slides else None,
        "rope_local_theta": local,
        "norms": "around" if flag_of(values, "use_sandwich_norm", source) else "before",
        "attention_gate": "head" if flag_of(values, "use_attention_gate", source) else None,
    }
    config = config_of(values, source, rope, qk_norm=True, **changes)
    return Fold(
        config, LFM3_NAMES, dict(_OUTSIDE), spelled={"self_attn.g_proj": ("self_attn.gate_proj", "self_attn.g_proj")}
    )


def _rotary_of_lfm3(values: Values, source: str, slides: bool) -> tuple[Values, float, Values]:
    """Rotary settings of layers that see all as Llama spells them, the base of those that slide, and of how many pairs
    each turns. `proportional` turns some pairs as if all did, which is another base of so many."""
    usual = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    }
    sections = values.get("rope_parameters", usual)
    refuse(values, source, "rope_scaling")
    if not isinstance(sections, dict) or not set(sections) <= set(usual):
        raise InputError(f"{source}: rope_parameters must have rotary settings for each kind of layer, and no others")
    sections = usual | sections
    for section in sections.values():
        number_of(section if isinstance(section, dict) else {}, "rope_theta", source)
    rope, local = ropes_of({"rope_parameters": sections}, source, 1e6, 1e4)
    whole = dict(rope.get("rope_parameters") or {})
    if whole.get("rope_type") != "proportional":
        return rope, local, {}
    size, theta = count_of(values, "head_dim", source), number_of(whole, "rope_theta", source)
    share, factor = (number_of({name: 1.0} | whole, name, source) for name in ("partial_rotary_factor", "factor"))
    pairs = int(share * size // 2)
    if not 1 <= pairs <= size // 2:
        raise InputError(f"{source}: partial_rotary_factor {share:g} of {size} dimensions is no number of pairs")
    kind = {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    found = {"rope_parameters": {"rope_theta": theta ** (2 * pairs / size), **kind}}
    if pairs == size // 2:
        return found, local, {}
    return found, local, {"rotary_pairs": pairs, "rotary_local_pairs": size // 2 if slides else None}


def _layers(values: Values, source: str) -> Values:
    """Which layers attend, and the others' convolution."""
    count = count_of(values, "num_hidden_layers", source)
    types, attending = values.get("layer_types"), values.get("full_attn_idxs")
    if types is None:
        if attending is not None and not (isinstance(attending, list) and all(type(each) is int for each in attending)):
            raise InputError(f"{source}: full_attn_idxs must be numbers of layers (got {attending!r:.80})")
        types = ["full_attention" if attending is None or layer in attending else "conv" for layer in range(count)]
    known = ("conv", "full_attention")
    if not isinstance(types, list) or len(types) != count or any(each not in known for each in types):
        raise InputError(f"{source}: layer_types must name conv or full_attention for {count} layers")
    if "conv" not in types:
        return {"layer_types": None}
    return {
        "layer_types": ["short_conv" if each == "conv" else each for each in types],
        "conv_taps": count_of(values, "conv_L_cache", source),
        "conv_bias": flag_of(values, "conv_bias", source),
    }


def _inner(values: Values, source: str) -> int:
    """The width of the MLP: with block_auto_adjust_ff_dim two thirds of what is said, times a factor, up to the next
    multiple."""
    inner = count_of(values, "intermediate_size", source, most=_LARGEST)
    if not flag_of(values, "block_auto_adjust_ff_dim", source):
        return inner
    inner = int(2 * inner / 3)
    multiple = count_of(values, "block_multiple_of", source, most=_LARGEST)
    inner = int(min(number_of(values, "block_ffn_dim_multiplier", source) * inner, _LARGEST))
    return -(-inner // multiple) * multiple


# What transformers assumes when a config.json leaves the field out.
_USUAL: Values = {
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALIASES = {"norm_eps": "rms_norm_eps"}
LFM2S: dict[str, Family] = {
    "lfm2": Family(
        _lfm2,
        _USUAL
        | {
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        aliases=_ALIASES,
    ),
    "lfm3": Family(
        _lfm3,
        {name: value for name, value in _USUAL.items() if name != "rope_theta"}
        | {
            "vocab_size": 128_000,
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 256,
            "conv_L_cache": 7,
            "use_sandwich_norm": True,
            "use_attention_gate": True,
            "pad_token_id": 124_893,
            "bos_token_id": 124_894,
            "eos_token_id": 124_900,
        },
        aliases=_ALIASES,
    ),
    "lfm2_moe": Family(
        _lfm2_moe,
        _USUAL
        | {
            "hidden_size": 2048,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        aliases=_ALIASES,
    ),
}
