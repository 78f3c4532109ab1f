"""Fields of `config.json` that types of folders share, spelled of a `DecoderConfig`."""

from __future__ import annotations

from typing import Any

from penjing.core.layers.hf_rope import rope_to_hf
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import one_or_list

Values = dict[str, Any]


def common(config: DecoderConfig) -> Values:
    """What every type has, as Llama spells it."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta")
    names += ("tie_word_embeddings", "bos_token_id", "pad_token_id", "attention_bias", "mlp_bias", "sliding_window")
    values = config.model_dump(include=set(names)) | {"hidden_act": "silu"}
    values["eos_token_id"] = one_or_list(config.eos_token_ids)
    scaling = rope_to_hf(config.rope_scaling)
    share = {} if config.rotary_pairs is None else {"partial_rotary_factor": 2 * config.rotary_pairs / config.head_dim}
    values["rope_parameters"] = {"rope_theta": config.rope_theta, **scaling, **share}
    if config.rope_scaling.rope_type == "longrope":  # where Phi-3 has it
        values["original_max_position_embeddings"] = config.rope_scaling.original_max_position_embeddings
    return values | share | ({"rope_scaling": scaling} if config.rope_scaling.rope_type != "default" else {})


def kinds(config: DecoderConfig) -> Values:
    """The kind of each layer."""
    return {"layer_types": [config.layer_type(layer) for layer in range(config.num_hidden_layers)]}


def two_bases(config: DecoderConfig) -> Values:
    """Layers of two kinds, each with a rotation of its own."""
    near = {"rope_type": "default", "rope_theta": config.rope_local_theta}
    both = {"full_attention": common(config)["rope_parameters"], "sliding_attention": near}
    return kinds(config) | {"rope_parameters": both, "rope_local_base_freq": config.rope_local_theta}


def unrotated(config: DecoderConfig) -> Values:
    """Layers of EXAONE, which do not rotate where they see all and there is a window, even if no layer has it."""
    there = config.sliding_window is not None or config.layer_rotary is None
    window = {} if there else {"sliding_window": config.max_position_embeddings}
    return kinds(config) | {"sliding_window_pattern": 4} | window


def convolutions(config: DecoderConfig) -> Values:
    """Layers of LFM2."""
    types = ["conv" if config.is_conv(layer) else "full_attention" for layer in range(config.num_hidden_layers)]
    return {"layer_types": types, "conv_L_cache": config.conv_taps, "conv_bias": config.conv_bias}
