"""How far answers are apart, and how far rounding alone may move them."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.core.graph.network import Network, set_tensor, tensors_of

CLOSE = 1e-5
"""How far an answer may be from the original's, as a share of the output's largest value."""
HALF = 2e-2  # the same for 16-bit numbers
PROBABLE = 0.03
"""Least scale of what lies between 0 and 1: a sigmoid of float32 errs by 1e-7 whatever its value."""
NOISE = 4.0
"""… or this many times what one rounding of each weight and input moves it: deep networks enlarge roundings."""


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference as a share of the largest value; infinite where shapes or what is no number differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    if not ours.numel():
        return 0.0
    one, other = ours.detach().double(), theirs.double()
    same = (one == other) | (one.isnan() & other.isnan())
    gap = torch.where(same, 0.0, (one - other).abs())
    known = other[other.isfinite()]
    scale = known.abs().max().item() if known.numel() else 0.0
    if known.numel() and theirs.is_floating_point() and known.min() >= 0 and known.max() <= 1:
        scale = max(scale, PROBABLE)
    largest = gap.max().item()
    return largest if largest == 0 or not largest < float("inf") else largest / max(scale, 1e-30)


def noise(network: Network) -> float:
    """How far one rounding of each weight and input moves the outputs, as a share of their scale."""
    generator = torch.Generator().manual_seed(0)

    def rounded(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        return value * (1 + (torch.rand(value.shape, generator=generator) - 0.5) * 2 * torch.finfo(value.dtype).eps)

    moved = network.copy()
    with torch.no_grad():
        for name, value in tensors_of(moved.module).items():
            set_tensor(moved.module, name, rounded(value.detach()).to(value.dtype))
        still = network(*network.inputs())
        turned = moved(*[rounded(value).to(value.dtype) for value in network.inputs()])
    return max(distance(one, other) for one, other in zip(turned, still, strict=True))
