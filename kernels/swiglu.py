"""SwiGLU gate (Shazeer, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, element by element; both of one shape and dtype, which the result has too.

    Raises:
        ValueError: different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    return F.silu(gate) * up
