"""Whether two configurations are one network, and what they have otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np

from penjing.core.gguf.architecture import Architecture
from penjing.core.layers.settings import RopeScaling
from penjing.core.models.config import DecoderConfig
from penjing.core.models.rope import yarn_magnitudes

_APART = (  # what is no computation, and what `_layers` says layer by layer
    "model_type", "bos_token_id", "eos_token_ids", "pad_token_id", "max_position_embeddings", "layer_types",
    "sliding_window", "sliding_windows", "layer_rotary", "rope_theta", "rope_local_theta", "rope_scaling", "lsh",
    "intermediate_sizes", "activation",
)  # fmt: skip
_READ = {  # of a rotary scaling
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}


def needs_window(here: Architecture) -> bool:
    """Whether llama.cpp computes windows of such files."""
    return isinstance(here.window, int)


def differences(config: DecoderConfig, written: DecoderConfig, read: DecoderConfig) -> list[str]:
    """What the network `read` has otherwise than `written`, as NAME=VALUE of `config`, of which `written` was made by
    adding biases of zero."""
    context = read.max_position_embeddings
    ours, theirs = _named(written, context), _named(read, context)
    found = [name for name in ours if ours[name] != theirs[name]]
    said = _said(config)
    return [each for name in found for each in (said[name] if name in said else [f"{name}={getattr(config, name)}"])]


def _named(config: DecoderConfig, context: int) -> dict[str, Any]:
    """Name → what two networks have alike that are one in `context` tokens."""
    values = {name: _plain(value) for name, value in config.model_dump().items() if name not in _APART}
    layers = range(config.num_hidden_layers)
    kinds = [config.layer_type(layer) for layer in layers]
    seen = [config.layer_window(layer) for layer in layers]
    values["windows"] = [window if window is not None and window < context else None for window in seen]
    values["kinds"] = ["full_attention" if kind == "sliding_attention" else kind for kind in kinds]
    values["rotary"] = [_rotary(config, layer) for layer in layers if not config.is_conv(layer)]
    values["widths"] = [config.ffn_size(layer) for layer in layers]
    values["activation"] = config.activation
    if config.activation == "gelu" and not config.mlp_gated:
        values["activation"] = "gelu_tanh"  # llama.cpp has no other; they differ by 0.0005 at most
    return values


def _rotary(config: DecoderConfig, layer: int) -> Any:
    kind = "main" if config.layer_rotary is None else config.layer_rotary[layer]
    if kind == "none":
        return None
    theta = config.rope_theta if kind == "main" else config.rope_local_theta
    scaling = config.rope_scaling if kind == "main" else RopeScaling()
    return _plain(theta), _plain(_scaling(scaling))


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    """What a rotary scaling computes within its context."""
    kind = "default" if scaling.rope_type == "dynamic" else scaling.rope_type
    values: dict[str, Any] = {"rope_type": kind} | {name: getattr(scaling, name) for name in _READ[kind]}
    if kind in ("yarn", "longrope"):
        values["attention_factor"] = float(f"{yarn_magnitudes(scaling)[0]:.6g}")  # a file has it as a product
    if kind == "longrope":
        values["long_factor"] = scaling.long_factor or scaling.short_factor
    return values


def _said(config: DecoderConfig) -> dict[str, list[str]]:
    """How a difference is told whose value alone would say little."""
    scaling, usual = config.rope_scaling, RopeScaling()
    names = ("attention_factor", "mscale", "mscale_all_dim", "truncate")
    odd = [f"{name}={getattr(scaling, name)}" for name in names if getattr(scaling, name) != getattr(usual, name)]
    rotary = [f"rotary scaling {scaling.rope_type!r}" + (f" with {', '.join(odd)}" if odd else "")]
    if config.layer_rotary is not None:
        rotary = [f"layer_rotary={'/'.join(sorted(set(config.layer_rotary)))}"]
    kinds = sorted({config.layer_type(layer) for layer in range(config.num_hidden_layers)})
    moe = config.moe
    return {
        "windows": [f"sliding_window={config.sliding_window} in layers {'/'.join(kinds)}"],
        "kinds": [f"layer_types={'/'.join(kinds)}"],
        "rotary": rotary,
        "widths": ["MLPs of different widths"],
        "moe": ["experts" if moe is None else "experts with " + ", ".join(_unusual(moe))],
        "latent_attention": ["latent attention"],
    }


def _unusual(moe: Any) -> list[str]:
    usual = {name: field.default for name, field in type(moe).model_fields.items()}
    sizes = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return [f"{name}={value}" for name, value in moe.model_dump().items() if name not in sizes and value != usual[name]]


def _plain(value: Any) -> Any:
    """Numbers as float32 holds them, in which the file has them."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(np.float32(value))
    return value
