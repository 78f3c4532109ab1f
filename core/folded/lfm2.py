"""LFM2: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of, number_of

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
_LARGEST = 1_000_000  # of a width


def _lfm2(values: Values, source: str) -> Fold:
    # What the first folders call a field counts before the name that others have.
    named = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    values = values | {ours: values[theirs] for theirs, ours in named.items() if theirs in values}
    values = values | {"intermediate_size": _inner(values, source)}
    config = config_of(values, source, qk_norm=True, **_layers(values, source))
    return Fold(config, NAMES, {"model.norm": "model.embedding_norm"})


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
LFM2S: dict[str, Family] = {
    "lfm2": Family(
        _lfm2,
        {
            "vocab_size": 65536,
            "hidden_size": 2560,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        aliases={"norm_eps": "rms_norm_eps"},
    ),
}
