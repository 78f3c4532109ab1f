"""A layer as it is stored: integers, scales, and a bias that an INT32 accumulator can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.compress.rounding.fake_quantize import WeightQuantizer

LARGEST_BIAS = 2.0**30  # in steps of an INT32 accumulator, which also holds the products


@dataclass(frozen=True)
class Folded:
    """y = conv or linear(x, weight · scale) + bias.

    Attributes:
        weight: int8 or float8_e4m3fn.
        scale: (channels,) float32.
        bias: (channels,) float32.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor


def bounded(
    quantizer: WeightQuantizer, integers: Tensor, scale: Tensor, bias: Tensor, input_scale: Tensor | None
) -> Folded:
    """A layer of stored `integers` whose bias an INT32 accumulator can hold: a channel that is nearly switched off gets
    a larger scale, and so smaller integers.

    Args:
        input_scale: () of its input, which the bias is stored in steps of; None: the bias stays floating.
    """
    needed = torch.zeros_like(scale) if input_scale is None else bias.abs() / (LARGEST_BIAS * input_scale)
    safe = torch.maximum(scale, needed)
    shape = (-1, *[1] * (integers.dim() - 1))
    changed = (safe != scale).view(shape)
    rounded = quantizer.format.store(integers.to(torch.float32) * (scale / safe).view(shape)).to(integers.dtype)
    if integers.dtype == torch.int8:
        return Folded(torch.where(changed, rounded, integers), safe, bias)
    both = torch.where(changed, rounded.to(torch.float32), integers.to(torch.float32))
    return Folded(both.to(integers.dtype), safe, bias)
