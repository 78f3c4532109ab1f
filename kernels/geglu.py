"""GELU gate (Shazeer, https://arxiv.org/abs/2002.05202) with the tanh formula (https://arxiv.org/abs/1606.08415).

½ (1 + tanh(z)) is the logistic function of 2 z, so that the gate is SiLU's with another argument, here and in C++.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension

TWICE = 1.5957691216057308  # 2 √(2 / π)
CUBIC = 0.044715


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) × up, element by element in float32; both of one shape and dtype, which the result has too.

    Raises:
        ValueError: different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return F.gelu(gate, approximate="tanh") * up
    extension = cpu_extension(gate, up)
    if extension is not None and gate.dtype == up.dtype == torch.float32:
        return extension.geglu(gate.detach().contiguous(), up.detach().contiguous())
    return geglu_torch(gate, up)


def geglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The reference of `geglu` without gradients."""
    # As in swiglu_torch: these operations round alike wherever an element lies.
    wide = gate.to(torch.float32)
    argument = torch.square(wide).mul_(CUBIC).add_(1).mul_(wide).mul_(-TWICE)
    denominator = argument.exp_().add_(1)
    return torch.div(wide, denominator, out=denominator).mul_(up).to(gate.dtype)
