"""SwiGLU gate (Shazeer, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, element by element in float32; both of one shape and dtype, which the result has too.

    Raises:
        ValueError: different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    extension = cpu_extension(gate, up)
    if extension is None or gate.dtype != torch.float32 or up.dtype != torch.float32:
        return swiglu_torch(gate, up)
    return extension.swiglu(gate.detach().contiguous(), up.detach().contiguous())


def swiglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The reference of `swiglu`; differentiable."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return F.silu(gate) * up
    # The vector and the scalar loop of F.silu differ in the last bit, so an element's result would depend on where it
    # lies; these operations round alike everywhere.
    wide = gate.to(torch.float32)
    denominator = torch.neg(wide).exp_().add_(1)
    return torch.div(wide, denominator, out=denominator).mul_(up).to(gate.dtype)
