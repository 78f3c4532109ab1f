"""SwiGLU gate (Shazeer, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, element by element in float32; both of one shape and dtype, which the result has too.

    Raises:
        ValueError: different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    # Not F.silu: its vector and its scalar loop differ in the last bit, so an element's result would depend on where it
    # lies; these four operations round alike everywhere.
    wide = gate.to(torch.float32)
    return (wide / (1 + torch.exp(-wide)) * up).to(gate.dtype)
