"""What a GGUF file says of a decoder's architecture: its metadata, and the tensor of its rotary frequencies.

Sources: the GGUF specification (ggml-org/ggml, docs/gguf.md), and llama.cpp for what each architecture computes.
`core/gguf/file.py` reads the same back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.gguf.names import (
    EXPERTS,
    LLAMA3_FIELDS,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    YARN_FIELDS,
)
from penjing.core.layers.settings import RopeScaling
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import NATIVE, decoder_config_to_hf
from penjing.core.models.rope import inverse_frequencies, yarn_magnitudes

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", **EXPERTS}
"""`model_type` → GGUF architecture."""
_UNEVEN = "deci"  # computes as llama, with widths of each layer's own


def architecture_of(config: DecoderConfig, source: str) -> str:
    """The GGUF architecture that computes `config` in its first `context_length` tokens.

    Raises:
        InputError: there is none, and why; `source` names the artifact.
    """
    unknown = {
        "latent attention": config.latent_attention is not None,
        "LSH attention": "lsh_attention" in (config.layer_types or ()),
        f"shared_layers={config.shared_layers}": config.shared_layers > 1,
        f"mlp_hadamard={config.mlp_hadamard}": config.mlp_hadamard > 0,
    }
    if found := [name for name, present in unknown.items() if present] + config.departures():
        raise InputError(f"{source} has {' and '.join(found)}, which is not written as GGUF; serve it with penjing")
    moe = config.moe
    like = tuple(EXPERTS) if moe is not None else ("llama", "qwen2", "qwen3")
    kinds = like if config.model_type == NATIVE else (config.model_type,)
    fitting = [kind for kind in kinds if kind in ARCHITECTURES and _is_a(config, kind)]
    if not fitting:
        raise InputError(
            f"{source}: no GGUF architecture has this combination of biases and norms (attention_bias="
            f"{config.attention_bias}, attention_output_bias={config.attention_output_bias}, mlp_bias="
            f"{config.mlp_bias}, qk_norm={config.qk_norm}){' and experts' if moe else ''}; penjing serves the "
            "artifact as it is"
        )
    if moe is not None and (moe.mlp_only_layers or moe.norm_topk_prob != (fitting[0] != "qwen2_moe")):
        raise InputError(
            f"{source}: mlp_only_layers={list(moe.mlp_only_layers)} and norm_topk_prob={moe.norm_topk_prob} in a "
            f"{fitting[0]} network: llama.cpp has experts in all of its layers, and shares of the chosen "
            "scores in all but qwen2_moe, and so it is not written as GGUF; penjing serves the artifact as it is"
        )
    architecture, uneven = ARCHITECTURES[fitting[0]], config.intermediate_sizes is not None
    scaling = config.rope_scaling.rope_type
    divided = scaling in ("llama3", "longrope")
    lost = f"rotary scaling {scaling!r}" if divided else "MLPs of different widths"
    if architecture != "llama" and (uneven or divided):
        raise InputError(
            f"{source}: {lost} in a {architecture} network: llama.cpp has that in llama networks alone, and so it is "
            "not written as GGUF; penjing serves the artifact as it is"
        )
    return _UNEVEN if uneven else architecture


def context_length(config: DecoderConfig) -> int:
    """Tokens in which the file computes the network: no more than the smallest window, within which a sliding layer
    sees everything. llama.cpp knows no windows in these architectures."""
    windows = (config.layer_window(layer) for layer in range(config.num_hidden_layers))
    return min([config.max_position_embeddings, *(window for window in windows if window is not None)])


def architecture_fields(config: DecoderConfig, source: str) -> dict[str, Any]:
    """Metadata of the architecture under its names in the file; numbers, texts or lists.

    Raises:
        InputError: no GGUF architecture computes `config`.
    """
    architecture = architecture_of(config, source)
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": context_length(config),
        "embedding_length": config.hidden_size,
        "feed_forward_length": list(config.intermediate_sizes or ()) or config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    if (moe := config.moe) is not None:
        values |= {"expert_count": moe.num_experts, "expert_used_count": moe.num_experts_per_tok}
        values["feed_forward_length" if architecture == "llama" else "expert_feed_forward_length"] = (
            moe.moe_intermediate_size
        )
        if moe.shared_expert_intermediate_size:
            values["expert_shared_feed_forward_length"] = moe.shared_expert_intermediate_size
    if config.model_type in ("mistral", "mixtral") and config.sliding_window is not None:
        values["attention.sliding_window"] = config.sliding_window
    scaling = config.rope_scaling
    if scaling.rope_type == "longrope":
        attention, _ = yarn_magnitudes(scaling)
        values |= {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": float(attention)}
        values["rope.scaling.original_context_length"] = scaling.original_max_position_embeddings
    if scaling.rope_type == "linear":
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if scaling.rope_type == "yarn":
        _check_yarn(scaling, source)
        values["rope.scaling.type"] = "yarn"
        values |= {f"rope.scaling.{name}": getattr(scaling, ours) for name, ours in YARN_FIELDS.items()}
    if scaling.rope_type == "llama3":  # llama.cpp reads the divisors alone; these say what they were made of
        values |= {f"rope.scaling.{name}": getattr(scaling, ours) for name, ours in LLAMA3_FIELDS.items()}
    return {
        "general.quantization_version": 2,
        **{f"{architecture}.{name}": value for name, value in values.items()},
    }


def _check_yarn(scaling: RopeScaling, source: str) -> None:
    """Raise InputError unless `scaling` is what llama.cpp computes from the factor and the original context alone."""
    usual = RopeScaling()
    rotated, _ = yarn_magnitudes(scaling)
    if not scaling.truncate or rotated != yarn_magnitudes(RopeScaling(rope_type="yarn", factor=scaling.factor))[0]:
        names = ("attention_factor", "mscale", "mscale_all_dim", "truncate")
        odd = [f"{name}={getattr(scaling, name)}" for name in names if getattr(scaling, name) != getattr(usual, name)]
        raise InputError(
            f"{source}: rotary scaling 'yarn' with {', '.join(odd)} has no place in GGUF; penjing serves the artifact "
            "as it is"
        )


def rotary_divisors(config: DecoderConfig) -> dict[str, NDArray[np.float32]]:
    """Name in the file → (head_dim / 2,) divisors of the rotary frequencies, where the scaling is written as such."""
    scaling = config.rope_scaling
    if scaling.rope_type == "longrope":
        both = {LONG_FACTORS: scaling.long_factor or scaling.short_factor, SHORT_FACTORS: scaling.short_factor}
        return {name: np.array(factors, np.float32) for name, factors in both.items()}
    if scaling.rope_type != "llama3":
        return {}
    plain = config.model_copy(update={"rope_scaling": RopeScaling()})
    return {ROPE_FACTORS: (inverse_frequencies(plain) / inverse_frequencies(config)).numpy()}


def _is_a(config: DecoderConfig, kind: str) -> bool:
    """Whether `config` with full attention and layers of one width is a network of the Hugging Face type `kind`."""
    windows = {"sliding_window": None, "sliding_windows": None, "layer_types": None}
    same = {"model_type": kind, "intermediate_sizes": None} | windows
    try:
        decoder_config_to_hf(config.model_copy(update=same))
    except InputError:
        return False
    return True
