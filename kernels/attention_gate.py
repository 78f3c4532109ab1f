"""Gates of what attention gives (https://arxiv.org/abs/2505.06708): their logistic function, or their softplus."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension

GateFunction = Literal["sigmoid", "softplus"]
GATE_FUNCTIONS: dict[GateFunction, int] = {"sigmoid": 7, "softplus": 8}
"""The number that the C++ extension knows each by, beside those of activations."""


def open_gate(gate: torch.Tensor, function: GateFunction) -> torch.Tensor:
    """`function` of each element of `gate`, computed in float32; shape and dtype of `gate`."""
    if torch.is_grad_enabled() and gate.requires_grad:
        return torch.sigmoid(gate) if function == "sigmoid" else F.softplus(gate)
    extension = cpu_extension(gate)
    if extension is not None and gate.dtype == torch.float32:
        return extension.activate(gate.detach().contiguous(), GATE_FUNCTIONS[function], (0.0, 0.0))
    return open_gate_torch(gate, function)


def open_gate_torch(gate: torch.Tensor, function: GateFunction) -> torch.Tensor:
    """The reference of `open_gate` without gradients."""
    # As in swiglu_torch: these operations round alike wherever an element lies.
    wide = gate.to(torch.float32)
    if function == "sigmoid":
        return torch.reciprocal(wide.neg().exp_().add_(1)).to(gate.dtype)
    return wide.abs().neg_().exp_().log1p_().add_(wide.clamp(min=0)).to(gate.dtype)
