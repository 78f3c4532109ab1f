"""The one rounding rule of all integer quantization: half to even, then clamp."""

from __future__ import annotations

import torch

INT8_LIMIT = 127  # symmetric: −128 is never produced, so that −q always exists


def divided(x: torch.Tensor, by: int) -> torch.Tensor:
    """x / by with one rounding, on every device: torch on CUDA multiplies by the reciprocal of a number of Python's."""
    return x / torch.full((), by, dtype=x.dtype, device=x.device)


def round_clamp(x: torch.Tensor, limit: int = INT8_LIMIT) -> torch.Tensor:
    """Round half to even and clamp to [−limit, limit]; same shape and floating dtype as `x`."""
    return torch.round(x).clamp_(-limit, limit)


def round_clamp_(x: torch.Tensor, limit: int = INT8_LIMIT) -> torch.Tensor:
    """`round_clamp` in place."""
    return x.round_().clamp_(-limit, limit)
