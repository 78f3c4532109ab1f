"""SwiGLU gate (Shazeer, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.quantize import quantize_per_token


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up, element by element in float32; both of one shape and dtype, which the result has too.

    Raises:
        ValueError: different shapes.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; they must be equal")
    gpu = gpu_kernels("swiglu", gate, up)
    if gpu is not None and gpu.takes(gate, up):
        return gpu.swiglu(gate, up)
    extension = cpu_extension(gate, up)
    if extension is None or gate.dtype != torch.float32 or up.dtype != torch.float32:
        return swiglu_torch(gate, up)
    return extension.swiglu(gate.detach().contiguous(), up.detach().contiguous())


CLAMP, STEEPNESS = 7.0, 1.702  # of clamped_swiglu


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """g × sigmoid(1.702 g) × (u + 1) with g = min(gate, 7) and u = up within −7 and 7, in float32 (gpt-oss);
    differentiable. Both are of one shape and dtype, which the result has too."""
    g = gate.to(torch.float32).clamp(max=CLAMP)
    u = up.to(torch.float32).clamp(-CLAMP, CLAMP)
    # torch's sigmoid differs in the last bit by where an element lies, see `swiglu_torch`.
    return (g / ((g * -STEEPNESS).exp() + 1) * (u + 1)).to(gate.dtype)


def swiglu_quantize(gate_MK: torch.Tensor, up_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_per_token(swiglu(gate_MK, up_MK))`: on a GPU in one pass over matrices of up to 32 768 columns.

    Args:
        gate_MK, up_MK: (M, K) floating, of one dtype.

    Returns:
        q_MK int8 and scale_M float32.

    Raises:
        ValueError: different shapes or types, or no matrices.
    """
    if gate_MK.shape != up_MK.shape or gate_MK.dtype != up_MK.dtype or gate_MK.dim() != 2:
        raise ValueError(
            f"gate has shape {tuple(gate_MK.shape)} and {gate_MK.dtype}, up {tuple(up_MK.shape)} and {up_MK.dtype}; "
            "two matrices of one shape and dtype are needed"
        )
    gpu = gpu_kernels("swiglu", gate_MK, up_MK)
    if gpu is not None and gpu.takes_rows(gate_MK, up_MK):
        return gpu.swiglu_quantize(gate_MK, up_MK)
    with torch.no_grad():
        return quantize_per_token(swiglu(gate_MK, up_MK))


def swiglu_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The reference of `swiglu`; differentiable."""
    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        return F.silu(gate) * up
    # The vector and the scalar loop of F.silu differ in the last bit, so an element's result would depend on where it
    # lies; these operations round alike everywhere.
    wide = gate.to(torch.float32)
    denominator = torch.neg(wide).exp_().add_(1)
    return torch.div(wide, denominator, out=denominator).mul_(up).to(gate.dtype)
