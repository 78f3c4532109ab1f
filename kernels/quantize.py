"""Dynamic INT8 quantization of activations: around zero with a scale a token, or above zero points of its blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.rounding import INT8_LIMIT, divided, round_clamp_

LEVELS = 255  # steps between the least and the largest of what has a zero point
# Inputs that share a scale and a zero point. Of 512, 256, 128 and 64 before SmolLM2's down_proj the divergence from the
# original is 4.4, 3.9, 3.9 and 3.7 thousandths of a nat, with one for a token 5.8; a block costs an addition an output.
ABOVE_INPUTS = 256


def quantize_per_token(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row by its largest magnitude.

    scale = amax / 127 (1 where that is zero), q = clamp(round_half_even(x / scale), −127, 127), in float32.
    A row that holds inf or NaN gets a scale that is not finite, so the damage stays visible downstream.

    Args:
        x_MK: (M, K) floating; half types are widened first.

    Returns:
        q_MK int8 and scale_M float32.

    Raises:
        ValueError: not a floating matrix with at least one column.
    """
    if x_MK.dim() != 2 or x_MK.shape[1] == 0 or not x_MK.is_floating_point():
        raise ValueError(f"x_MK has shape {tuple(x_MK.shape)} and {x_MK.dtype}; a floating (M, K ≥ 1) is needed")
    gpu = gpu_kernels("quantize", x_MK)
    if gpu is not None and gpu.takes(x_MK):
        return gpu.quantize_per_token(x_MK)
    extension = cpu_extension(x_MK)
    return quantize_per_token_torch(x_MK) if extension is None else extension.quantize_per_token(x_MK)


def quantize_per_token_torch(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `quantize_per_token`."""
    x_MK = x_MK.to(torch.float32)
    # Two reductions: the infinity norm is one and takes nine times as long.
    scale_M = divided(torch.maximum(x_MK.amax(dim=1), -x_MK.amin(dim=1)), INT8_LIMIT)
    scale_M.masked_fill_(scale_M == 0, 1.0)
    return round_clamp_(x_MK / scale_M[:, None]).to(torch.int8), scale_M


def quantize_above(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize each block of ABOVE_INPUTS neighbours in a row by its range, 0 included.

    As compressed-tensors does with asymmetric dynamic activations of groups. The last of the B = ⌈K / ABOVE_INPUTS⌉
    blocks may have fewer. scale = (max − min) / 255 (1 where that is zero), zero = round_half_even(−min / scale) − 128,
    q = clamp(round_half_even(x / scale) + zero, −128, 127), in float32: x ≈ (q − zero) × scale. A block whose values
    lie on one side of 0 gets half the step of `quantize_per_token`.
    A block that holds inf or NaN gets a scale that is not finite, so the damage stays visible downstream.

    Args:
        x_MK: (M, K ≥ 1) floating; half types are widened first.

    Returns:
        q_MK int8, scale_MB float32, zero_MB int32 in −128 … 127.
    """
    rows, inputs = x_MK.shape
    size = min(inputs, ABOVE_INPUTS)
    blocks = -(-inputs // size)
    # 0 is in every range, so that zeros behind the last input change nothing.
    x_MBK = F.pad(x_MK.to(torch.float32), (0, -inputs % size)).view(rows, blocks, size)
    below_MB1 = (-x_MBK.amin(dim=2, keepdim=True)).clamp_(min=0)
    scale_MB1 = divided(x_MBK.amax(dim=2, keepdim=True).clamp_(min=0) + below_MB1, LEVELS)
    scale_MB1.masked_fill_(scale_MB1 == 0, 1.0)
    zero_MB1 = (below_MB1 / scale_MB1).round_().nan_to_num_(nan=128.0) - 128
    q_MBK = (x_MBK / scale_MB1).round_().add_(zero_MB1).clamp_(-128, 127).nan_to_num_(nan=0.0).to(torch.int8)
    q_MK = q_MBK.view(rows, blocks * size)[:, :inputs].contiguous()
    return q_MK, scale_MB1[..., 0], zero_MB1[..., 0].to(torch.int32)


def dequantize_above(q_MK: torch.Tensor, scale_MB: torch.Tensor, zero_MB: torch.Tensor) -> torch.Tensor:
    """(q − zero) × scale of what `quantize_above` gives: (M, K) float32."""
    inputs = q_MK.shape[1]
    scale_MK, zero_MK = (each.repeat_interleave(ABOVE_INPUTS, dim=1)[:, :inputs] for each in (scale_MB, zero_MB))
    return (q_MK - zero_MK).to(torch.float32).mul_(scale_MK)
