"""LFM2, dense and with experts: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of, number_of, whole_of

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
