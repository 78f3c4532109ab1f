"""Which folder of Hugging Face's holds the network of a `DecoderConfig`: what `core/folded` reads, backwards.

A form is the `config.json` that a type of folder would have for the network. It fits if it reads back, by
`fold_from_hf`, as the very network; so each form below says only how its type spells the fields, and never what it is
good for. Factors that a family multiplies by are 1 here, but those that its code fixes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf
from penjing.core.folded.fold import Fold, of_known_type
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import (
    FOLDED,
    NATIVE,
    decoder_config_to_hf,
)
from penjing.core.published.experts import EXPERT_FORMS
from penjing.core.published.fields import Values, common, convolutions, kinds, two_bases, unrotated

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
    known = of_known_type(config) if config.model_type == NATIVE else config
    if known.model_type != NATIVE:
        return Published(decoder_config_to_hf(known), Fold(known))
    for kind, spell in FORMS.items():
        values = common(config) | {"model_type": kind, "architectures": [FOLDED[kind]]} | spell(config)
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


def _gemma(config: DecoderConfig) -> Values:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(config: DecoderConfig) -> Values:
    caps = {"final_logit_softcapping": config.logit_cap, "attn_logit_softcapping": config.attention_cap}
    return _gemma(config) | caps | kinds(config) | {"query_pre_attn_scalar": config.head_dim}


def _gemma3(config: DecoderConfig) -> Values:
    return _gemma(config) | {"query_pre_attn_scalar": config.head_dim} | two_bases(config)


def _plain(config: DecoderConfig) -> Values:
    return {}


def _smollm3(config: DecoderConfig) -> Values:
    rotates = [int(kind != "none") for kind in config.layer_rotary or ["main"] * config.num_hidden_layers]
    slides = config.sliding_window is not None
    return kinds(config) | {"no_rope_layers": rotates, "no_rope_layer_interval": 4, "use_sliding_window": slides}


def _phi(config: DecoderConfig) -> Values:
    act = "gelu" if config.activation == "gelu" else "gelu_new"
    return {"hidden_act": act, "layer_norm_eps": config.rms_norm_eps, "qk_layernorm": False}


def _cohere(config: DecoderConfig) -> Values:
    return {"layer_norm_eps": config.rms_norm_eps, "logit_scale": 1.0, "use_qk_norm": False}


def _cohere2(config: DecoderConfig) -> Values:
    return _cohere(config) | kinds(config)


def _squared(config: DecoderConfig) -> Values:
    return {"hidden_act": "relu2"}


def _hyperclovax(config: DecoderConfig) -> Values:
    return _ONES | {"use_post_norm": config.norms == "around", "attention_multiplier": config.head_dim**-0.5}


def _granite_swa(config: DecoderConfig) -> Values:
    bases = {"main": config.rope_theta, "local": config.rope_local_theta, "none": 0}
    rotary = config.layer_rotary or ("main",) * config.num_hidden_layers
    each = {} if config.layer_rotary is None else {"layer_rope_theta": [bases[kind] for kind in rotary]}
    return kinds(config) | _ONES | each | {"attention_multiplier": config.head_dim**-0.5}


def _lfm2(config: DecoderConfig) -> Values:
    return convolutions(config) | {"block_auto_adjust_ff_dim": False, "norm_eps": config.rms_norm_eps}


FORMS: dict[str, Callable[[DecoderConfig], Values]] = {
    "gemma3_text": _gemma3,
    "gemma2": _gemma2,
    "gemma": _gemma,
    "vaultgemma": _gemma2,
    "olmo2": _plain,
    "olmo3": two_bases,
    "smollm3": _smollm3,
    "exaone4": unrotated,
    "phi3": _plain,
    "glm": _plain,
    "glm4": _plain,
    "hyperclovax": _hyperclovax,
    "cwm": kinds,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "phi": _phi,
    "arcee": _squared,
    "bitnet": _squared,
    "hunyuan_v1_dense": _plain,
    "granite_swa": _granite_swa,
    "lfm2": _lfm2,
    **EXPERT_FORMS,
}
"""Type of folder → what its `config.json` says beside and otherwise than Llama's."""
