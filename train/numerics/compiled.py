"""torch.compile for a model: a decoder by its blocks, which share a graph, other networks as a whole.

A decoder's blocks have one shape, so that one of them is compiled in place of all, as torchtitan does. FSDP collects a
block's parameters before it and lets them go after it, and tensor parallelism exchanges activations at its edges, where
a graph of the whole model would be cut: networks that processes share are compiled by their blocks, too.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.core.models.moe import keep_out_of_graphs
from penjing.train.numerics.recompute import blocks


def compile_model(model: nn.Module, *, is_shared: bool, recompute: bool = False, backend: str = "inductor") -> None:
    """Let torch compile what `model` computes. Recomputation, formats and sharding come after, around its blocks.

    The classes of the blocks change; names and parameters do not.

    Args:
        is_shared: processes will hold parts of the model.
        recompute: blocks will be computed again in the backward pass.

    Raises:
        ConfigError: `recompute` of a network that is compiled as a whole.
    """
    keep_out_of_graphs()
    if not is_shared and not isinstance(model, Decoder):
        if recompute:
            raise ConfigError(
                "memory.recompute is around blocks, and compile takes a network that is no decoder as a whole; "
                "write recompute = 'none', or compile = false"
            )
        model.compile(backend=backend)
        return
    if isinstance(model, Decoder):
        _number_by_kind(model)
    for block in blocks(model).values():
        block.__class__ = _compiled(type(block), backend)


def _number_by_kind(model: Decoder) -> None:
    """What mixes tokens knows its layer's number, by which a cache keeps what it reads and the configuration says what
    it may see. A graph is made for one number: in training, without a cache, layers that see alike take the first's."""
    config = model.config
    first: dict[Any, int] = {}
    for layer in model.model.layers:
        mixer: Any = layer.mixer
        kind = config.layer_type(mixer.layer)
        if kind != "lsh_attention":  # which draws its rotations by the number
            mixer.layer = first.setdefault((kind, config.layer_window(mixer.layer)), mixer.layer)


@functools.cache
def _compiled(original: type[nn.Module], backend: str) -> type[nn.Module]:
    # Layers of unlike widths have a graph each, in training and in evaluation; by itself torch stops at eight.
    limit: Any = {"recompile_limit": 256}  # which torch's overloads do not name
    compiled = torch.compile(original.forward, backend=backend, **limit)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, *args, **kwargs)

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
