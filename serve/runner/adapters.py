"""Adapters of a folder each, in the form that a decoder step takes."""

from __future__ import annotations

from pathlib import Path

import torch

from penjing.core.artifact.lora import AdapterFolder
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint
from penjing.core.checkpoint.dtypes import DTYPES
from penjing.core.checkpoint.load import SEES
from penjing.core.errors import ConfigError
from penjing.core.family import family_of
from penjing.kernels.low_rank import LowRank, Pairs
from penjing.serve.engine.config import EngineConfig

# A name of the C++ step → what a layer may have there.
_NAMES = {
    "q": ("self_attn.q_proj", "conv.in_proj"),
    "k": ("self_attn.k_proj",),
    "v": ("self_attn.v_proj",),
    "head_gate": ("self_attn.g_proj",),
    "out": ("self_attn.o_proj", "conv.out_proj"),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}


def open_adapters(base: Checkpoint, config: EngineConfig) -> dict[str, AdapterFolder]:
    """The adapters that `config` names, held to the model by their headers alone.

    Raises:
        InputError, ConfigError: one is missing, damaged, pickled, or does not fit; names it.
    """
    if config.adapters and config.device == "cuda":
        raise ConfigError("adapters are served on a CPU only; leave them out, or take device=cpu")
    return {name: AdapterFolder(name, folder, base) for name, folder in config.adapters.items()}


def load_adapters(folder: Path, config: EngineConfig) -> dict[str, Pairs]:
    """The adapters that `config` names, of the model in `folder`.

    Raises:
        InputError: see `open_adapters`.
        ConfigError: see there; or the model sees.
    """
    if not config.adapters:
        return {}
    if family_of(folder) == SEES:
        raise ConfigError("a decoder that sees takes no adapters so far; leave them out")
    base = open_checkpoint(folder)
    dtype = _dtype(base, config)
    layers = range(base.config.num_hidden_layers)
    found: dict[str, Pairs] = {}
    for name, adapter in open_adapters(base, config).items():
        pairs = {layer: LowRank(pair.a_RK, pair.b_NR, pair.scale) for layer, pair in adapter.load(dtype).items()}
        found[name] = [
            {
                short: pairs[full]
                for short, parts in _NAMES.items()
                for part in parts
                if (full := f"model.layers.{layer}.{part}") in pairs
            }
            for layer in layers
        ]
    return found


def _dtype(base: Checkpoint, config: EngineConfig) -> torch.dtype | None:
    if config.adapter_dtype == "auto":
        return None if base.quantization is None else torch.bfloat16
    return DTYPES[config.adapter_dtype]
