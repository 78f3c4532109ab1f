"""A gated convolution over the last few tokens, in the place of attention (LFM2, https://arxiv.org/abs/2511.23404).

Shapes: T tokens, E hidden; leading dimensions are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Before(Protocol):
    """(layer, x (…, T, E), count) → `count` tensors like `x`: what stood so many tokens before each token in its
    sequence, the farthest first; zeros before its first token."""

    def __call__(self, layer: int, x: Tensor, count: int, /) -> list[Tensor]: ...


class Taps(nn.Module):
    """A sum over tokens, each channel with a weight of its own for each of them."""

    def __init__(self, hidden: int, taps: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden, 1, taps))  # as a depthwise Conv1d has it
        self.bias = nn.Parameter(torch.zeros(hidden)) if bias else None
        nn.init.normal_(self.weight, std=taps**-0.5)

    def forward(self, seen: Sequence[Tensor]) -> Tensor:
        """(…, E) of each tap's tokens, the farthest first → (…, E). Element by element and in one order: a row's bits
        depend on nothing else."""
        weight_KE = self.weight[:, 0].t()
        total = seen[0] * weight_KE[0]
        for x, weight_E in zip(seen[1:], weight_KE[1:], strict=True):
            total = total + x * weight_E
        return total if self.bias is None else total + self.bias


class ShortConv(nn.Module):
    """One projection gives each token an input, a gate before and a gate behind the convolution of the gated inputs of
    the last `taps` tokens; another projection gives the result. All that a token needs of those before it is their
    gated inputs, (E,) each."""

    def __init__(self, hidden: int, taps: int, bias: bool, layer: int):
        super().__init__()
        self.layer = layer
        self.num_before = taps - 1
        self.in_proj = nn.Linear(hidden, 3 * hidden, bias=bias)
        self.taps = Taps(hidden, taps, bias)
        self.out_proj = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: Tensor, before: Before) -> Tensor:
        gate_in, gate_out, value = self.in_proj(x).chunk(3, dim=-1)
        gated = gate_in * value
        return self.out_proj(gate_out * self.taps([*before(self.layer, gated, self.num_before), gated]))
