"""The activation of an MLP without a gate: GELU by its integral or its tanh formula, the square of ReLU, SiLU.

GELU: https://arxiv.org/abs/1606.08415; the square of ReLU: https://arxiv.org/abs/2109.08668.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.geglu import CUBIC, TWICE

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "gelu", "relu2")
"""By the number that the C++ extension knows them by."""


def activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """`kind` of each element of `x`, computed in float32; shape and dtype of `x`."""
    if torch.is_grad_enabled() and x.requires_grad:
        if kind == "relu2":
            return F.relu(x).square()
        return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    extension = cpu_extension(x)
    if extension is not None and x.dtype == torch.float32:
        return extension.activate(x.detach().contiguous(), ACTIVATIONS.index(kind))
    return activate_torch(x, kind)


def activate_torch(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """The reference of `activate` without gradients."""
    # As in swiglu_torch: these operations round alike wherever an element lies.
    wide = x.to(torch.float32)
    if kind == "relu2":
        return wide.clamp(min=0).square_().to(x.dtype)
    if kind == "gelu":
        return torch.erf(wide * 0.5**0.5).add_(1).mul_(0.5).mul_(wide).to(x.dtype)
    argument = torch.square(wide).mul_(CUBIC).add_(1).mul_(wide).mul_(-TWICE) if kind == "gelu_tanh" else -wide
    return torch.div(wide, argument.exp_().add_(1)).to(x.dtype)
