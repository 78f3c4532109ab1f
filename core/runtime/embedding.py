"""An embedding in INT8, which may be one table with the LM head.

An artifact stores it as `model.embed_tokens.weight` (int8, (V, E)) and `model.embed_tokens.weight_scale` (floating
(V, 1)), as compressed-tensors does. Where it is tied to the LM head, which multiplies with the same integers and
scales, `model.embed_tokens.weight_channel` (floating (E,)) is what each channel of a row that is looked up is
multiplied by: the last norm divides by it, so that the head's inputs fit INT8 (SmoothQuant).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from penjing.core.runtime.quantized import moved
from penjing.core.runtime.schemes import EMBEDDING_MODULE
from penjing.kernels.step_layers import Int8Table

CHANNEL = f"{EMBEDDING_MODULE}.weight_channel"


class Int8Embedding(nn.Module):
    """(…) int64 token ids → (…, E) float32. It has no parameters; `table` goes where the module is moved."""

    def __init__(self, table: Int8Table):
        super().__init__()
        self.table = table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Embedding:
        super()._apply(fn, recurse)
        self.table = moved(self.table, fn)
        return self

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.table.rows(token_ids)

    def extra_repr(self) -> str:
        tokens, width = self.table.weight_VE.shape
        return f"{tokens}, {width}, tied={self.table.channel_E is not None}"


def stored_table(tensor: Callable[[str], Tensor], tied: bool) -> Int8Table:
    """The table of the tensors that `tensor` finds.

    Raises:
        ValueError: a wrong shape or dtype, or factors that are not positive numbers.
    """
    weight_VE, scale_V = tensor(f"{EMBEDDING_MODULE}.weight"), tensor(f"{EMBEDDING_MODULE}.weight_scale")
    if weight_VE.dim() != 2 or weight_VE.dtype != torch.int8:
        raise ValueError(f"weight is {tuple(weight_VE.shape)} {weight_VE.dtype}; int8 (V, E) is needed")
    tokens, width = weight_VE.shape
    vectors = [("weight_scale", scale_V, tokens)]
    channel_E = tensor(CHANNEL) if tied else None
    if channel_E is not None:
        vectors.append(("weight_channel", channel_E, width))
    for name, vector, count in vectors:
        if vector.numel() != count or not vector.is_floating_point():
            raise ValueError(f"{name} is {tuple(vector.shape)} {vector.dtype}; {count} floating values are needed")
        if not ((vector > 0) & torch.isfinite(vector)).all():
            raise ValueError(f"{name} holds values that are not positive numbers")
    flat_V = scale_V.reshape(tokens).to(torch.float32).contiguous()
    channel_E = None if channel_E is None else channel_E.reshape(width).to(torch.float32).contiguous()
    return Int8Table(weight_VE.contiguous(), flat_V, channel_E)


def tied_name(name: str) -> str:
    """Where the tensor `name` lies if the LM head is a table with the embedding."""
    return name.replace("lm_head.", f"{EMBEDDING_MODULE}.", 1) if name.startswith("lm_head.") else name
