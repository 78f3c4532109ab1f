"""torch.compile for a model whose processes share its parameters: each block by itself.

FSDP collects a block's parameters before it and lets them go after it, and tensor parallelism exchanges activations at
its edges. A graph of the whole model would be cut there anyhow, so that each block is compiled, as torchtitan does.
Blocks of one shape share one graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from penjing.core.models.decoder import Decoder
from penjing.core.models.moe import keep_out_of_graphs
from penjing.train.numerics.recompute import blocks


def compile_blocks(model: nn.Module, backend: str = "inductor") -> None:
    """Let torch compile what each block of `model` computes. Recomputation, formats and sharding come after, around it.

    The classes of the blocks change; names and parameters do not.
    """
    keep_out_of_graphs()
    if isinstance(model, Decoder):
        _number_by_kind(model)
    for block in blocks(model).values():
        block.__class__ = _compiled(type(block), backend)


def _number_by_kind(model: Decoder) -> None:
    """Attention knows its layer's number, by which a cache keeps its keys and the configuration says what it may see. A
    graph is made for one number: in training without a cache, so layers that see alike take the number of the first."""
    config = model.config
    first: dict[Any, int] = {}
    for layer in model.model.layers:
        attention: Any = layer.self_attn
        kind = config.layer_type(attention.layer)
        if kind != "lsh_attention":  # which draws its rotations by the number
            attention.layer = first.setdefault((kind, config.layer_window(attention.layer)), attention.layer)


@functools.cache
def _compiled(original: type[nn.Module], backend: str) -> type[nn.Module]:
    compiled = torch.compile(original.forward, backend=backend)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return compiled(self, *args, **kwargs)

    return type(original.__name__, (original,), {"forward": forward, "__module__": original.__module__})
