"""Operators of ONNX that torch does not have: rounding, and an average that is computed on integers."""

from __future__ import annotations

import torch
from torch import Tensor

ZERO_TYPES = {"int8": torch.int8, "uint8": torch.uint8, "fp8": torch.float8_e4m3fn}
_WIDE = torch.float32


@torch.library.custom_op("penjing::quantized", mutates_args=())
def quantized(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """What QuantizeLinear then DequantizeLinear leave of `x`, float32 of any shape.

    Args:
        scale: () float32.
        zero: () in the type that is stored: int8, uint8 or float8_e4m3fn.
    """
    if zero.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(torch.float8_e4m3fn).max
        return (x / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).to(_WIDE) * scale
    limits = torch.iinfo(zero.dtype)
    wide = zero.to(_WIDE)
    return (((x / scale).round() + wide).clamp(limits.min, limits.max) - wide) * scale


@torch.library.custom_op("penjing::widened", mutates_args=())
def widened(stored: Tensor, scale: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    """`stored` (int8, int32 or float8_e4m3fn, symmetric) times `scale`, as DequantizeLinear does; float32.

    Args:
        scale: float32, one for each index of `axis` of `stored`.
        zero: zeros of the stored type, which ONNX Runtime's Gemm wants to see; None for int32.
    """
    shape = [1] * stored.dim()
    shape[axis] = -1
    return stored.to(_WIDE) * scale.view(shape)


@torch.library.custom_op("penjing::averaged", mutates_args=())
def averaged(x: Tensor) -> Tensor:
    """(N, C, H, W) → (N, C, 1, 1): the mean of each channel, an operator of its own in ONNX."""
    return x.mean((2, 3), keepdim=True)


@quantized.register_fake
def _(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return torch.empty_like(x)


@widened.register_fake
def _(stored: Tensor, scale: Tensor, zero: Tensor | None, axis: int) -> Tensor:
    return torch.empty(stored.shape, dtype=_WIDE, device=stored.device)


@averaged.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], 1, 1))


AVERAGED, QUANTIZED, WIDENED = (
    torch.ops.penjing.averaged.default,
    torch.ops.penjing.quantized.default,
    torch.ops.penjing.widened.default,
)
"""What the nodes of a graph call."""
