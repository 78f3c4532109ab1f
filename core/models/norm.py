"""The layer norm of the decoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penjing.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """`kernels.rms_norm` with its weight."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
