"""The activation of an MLP without a gate: GELU by its integral or its tanh formula, ReLU and its square, SiLU, xIELU.

GELU: https://arxiv.org/abs/1606.08415; the square of ReLU: https://arxiv.org/abs/2109.08668; xIELU:
https://arxiv.org/abs/2411.13010.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.geglu import CUBIC, TWICE

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu")
"""By the number that the C++ extension knows them by."""
XIELU_LINEAR = 0.5  # what xIELU multiplies all inputs by, whatever its curve


def activate(x: torch.Tensor, kind: Activation, curve: tuple[float, float] = (0.0, 0.0)) -> torch.Tensor:
    """`kind` of each element of `x`, computed in float32; shape and dtype of `x`.

    Args:
        curve: the factors of xielu, see there.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        if kind == "xielu":
            return xielu(x, *curve)
        if kind in ("relu", "relu2"):
            return F.relu(x) if kind == "relu" else F.relu(x).square()
        return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    extension = cpu_extension(x)
    if extension is not None and x.dtype == torch.float32:
        return extension.activate(x.detach().contiguous(), ACTIVATIONS.index(kind), curve)
    return activate_torch(x, kind, curve)


def activate_torch(x: torch.Tensor, kind: Activation, curve: tuple[float, float] = (0.0, 0.0)) -> torch.Tensor:
    """The reference of `activate` without gradients."""
    # As in swiglu_torch: these operations round alike wherever an element lies.
    wide = x.to(torch.float32)
    if kind == "xielu":
        negative = wide.clamp(max=0)
        curved = negative.exp().sub_(1).sub_(negative).mul_(curve[1])
        return curved.add_(wide.clamp(min=0).square_().mul_(curve[0])).add_(wide * XIELU_LINEAR).to(x.dtype)
    if kind in ("relu", "relu2"):
        positive = wide.clamp(min=0)
        return (positive if kind == "relu" else positive.square_()).to(x.dtype)
    if kind == "gelu":
        return torch.erf(wide * 0.5**0.5).add_(1).mul_(0.5).mul_(wide).to(x.dtype)
    argument = torch.square(wide).mul_(CUBIC).add_(1).mul_(wide).mul_(-TWICE) if kind == "gelu_tanh" else -wide
    return torch.div(wide, argument.exp_().add_(1)).to(x.dtype)


def xielu(x: torch.Tensor, positive: torch.Tensor | float, negative: torch.Tensor | float) -> torch.Tensor:
    """positive x² + x / 2 of what is positive, negative (eˣ − 1 − x) + x / 2 of the rest; differentiable."""
    below = x.clamp(max=0)
    return positive * x.clamp(min=0).square() + negative * (torch.expm1(below) - below) + XIELU_LINEAR * x
