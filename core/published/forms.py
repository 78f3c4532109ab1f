"""Which folder of Hugging Face's holds the network of a `DecoderConfig`: what `core/folded` reads, backwards.

A form is the `config.json` that a type of folder would have for the network. It fits if it reads back, by
`fold_from_hf`, as the very network; so each form below says only how its type spells the fields, and never what it is
good for. Factors that a family multiplies by are 1 here, but those that its code fixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf
from penjing.core.folded.fold import Fold
from penjing.core.layers.hf_rope import rope_to_hf
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import (
    FOLDED,
    NATIVE,
    SUPPORTED_MODEL_TYPES,
    decoder_config_to_hf,
    one_or_list,
)

Values = dict[str, Any]
_ONES = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)


@dataclass(frozen=True)
class Published:
    """A network as a folder of Hugging Face's.

    Attributes:
        values: its `config.json`, but for the dtype.
        fold: how the tensors of such a folder become the network's.
    """

    values: Values
    fold: Fold


def published(config: DecoderConfig, source: str) -> Published:
    """The folder that transformers reads as `config`.

    Raises:
        InputError: no type of folder holds such a network; `source` names it.
    """
    kinds = SUPPORTED_MODEL_TYPES if config.model_type == NATIVE and not config.departures() else (config.model_type,)
    for kind in kinds:
        candidate = config.model_copy(update={"model_type": kind})
        if kind != NATIVE and _is_expressible(candidate):
            return Published(decoder_config_to_hf(candidate), Fold(candidate))
    for kind, spell in FORMS.items():
        values = _common(config) | {"model_type": kind, "architectures": [FOLDED[kind]]} | spell(config)
        try:
            fold = fold_from_hf(values, source)
        except InputError:
            continue
        if fold.config.model_copy(update={"model_type": NATIVE}) == config:
            return Published(values, fold)
    what = ", ".join(config.departures()) or "layers of different widths or windows"
    raise InputError(
        f"{source} has {what}: no type of network that transformers reads has all of it; serve it with penjing, or "
        "prune with uniform widths"
    )


def _is_expressible(config: DecoderConfig) -> bool:
    try:
        decoder_config_to_hf(config)
    except InputError:
        return False
    return True


def _common(config: DecoderConfig) -> Values:
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


def _kinds(config: DecoderConfig) -> Values:
    return {"layer_types": [config.layer_type(layer) for layer in range(config.num_hidden_layers)]}


def _two_bases(config: DecoderConfig) -> Values:
    """Layers of two kinds, each with a rotation of its own."""
    near = {"rope_type": "default", "rope_theta": config.rope_local_theta}
    both = {"full_attention": _common(config)["rope_parameters"], "sliding_attention": near}
    return _kinds(config) | {"rope_parameters": both, "rope_local_base_freq": config.rope_local_theta}


def _gemma(config: DecoderConfig) -> Values:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(config: DecoderConfig) -> Values:
    caps = {"final_logit_softcapping": config.logit_cap, "attn_logit_softcapping": config.attention_cap}
    return _gemma(config) | caps | _kinds(config) | {"query_pre_attn_scalar": config.head_dim}


def _gemma3(config: DecoderConfig) -> Values:
    return _gemma(config) | {"query_pre_attn_scalar": config.head_dim} | _two_bases(config)


def _plain(config: DecoderConfig) -> Values:
    return {}


def _smollm3(config: DecoderConfig) -> Values:
    rotates = [int(kind != "none") for kind in config.layer_rotary or ["main"] * config.num_hidden_layers]
    slides = config.sliding_window is not None
    return _kinds(config) | {"no_rope_layers": rotates, "no_rope_layer_interval": 4, "use_sliding_window": slides}


def _exaone4(config: DecoderConfig) -> Values:
    return _kinds(config) | {"sliding_window_pattern": 4}


def _phi(config: DecoderConfig) -> Values:
    act = "gelu" if config.activation == "gelu" else "gelu_new"
    return {"hidden_act": act, "layer_norm_eps": config.rms_norm_eps, "qk_layernorm": False}


def _cohere(config: DecoderConfig) -> Values:
    return {"layer_norm_eps": config.rms_norm_eps, "logit_scale": 1.0, "use_qk_norm": False}


def _cohere2(config: DecoderConfig) -> Values:
    return _cohere(config) | _kinds(config)


def _squared(config: DecoderConfig) -> Values:
    return {"hidden_act": "relu2"}


def _hyperclovax(config: DecoderConfig) -> Values:
    return _ONES | {"use_post_norm": config.norms == "around", "attention_multiplier": config.head_dim**-0.5}


def _granite_swa(config: DecoderConfig) -> Values:
    bases = {"main": config.rope_theta, "local": config.rope_local_theta, "none": 0}
    rotary = config.layer_rotary or ("main",) * config.num_hidden_layers
    each = {} if config.layer_rotary is None else {"layer_rope_theta": [bases[kind] for kind in rotary]}
    return _kinds(config) | _ONES | each | {"attention_multiplier": config.head_dim**-0.5}


def _lfm2(config: DecoderConfig) -> Values:
    types = ["conv" if config.is_conv(layer) else "full_attention" for layer in range(config.num_hidden_layers)]
    taps = {"conv_L_cache": config.conv_taps, "conv_bias": config.conv_bias}
    return {"layer_types": types, "block_auto_adjust_ff_dim": False, "norm_eps": config.rms_norm_eps} | taps


FORMS: dict[str, Callable[[DecoderConfig], Values]] = {
    "gemma3_text": _gemma3,
    "gemma2": _gemma2,
    "gemma": _gemma,
    "vaultgemma": _gemma2,
    "olmo2": _plain,
    "olmo3": _two_bases,
    "smollm3": _smollm3,
    "exaone4": _exaone4,
    "phi3": _plain,
    "glm": _plain,
    "glm4": _plain,
    "hyperclovax": _hyperclovax,
    "cwm": _kinds,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "phi": _phi,
    "arcee": _squared,
    "bitnet": _squared,
    "hunyuan_v1_dense": _plain,
    "granite_swa": _granite_swa,
    "lfm2": _lfm2,
}
"""Type of folder → what its `config.json` says beside and otherwise than Llama's."""
