"""Dynamic INT8 quantization of activations, one scale a token: around zero, or above a zero point of the token."""

from __future__ import annotations

import torch

from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.rounding import INT8_LIMIT, divided, round_clamp_

LEVELS = 255  # steps between the least and the largest of a row that has a zero point


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
    """Quantize each row by its range, 0 included, as compressed-tensors' asymmetric dynamic activations are.

    scale = (max − min) / 255 (1 where that is zero), zero = round_half_even(−min / scale) − 128,
    q = clamp(round_half_even(x / scale) + zero, −128, 127), in float32: x ≈ (q − zero) × scale. A row whose values lie
    on one side of 0 gets half the step of `quantize_per_token`.
    A row that holds inf or NaN gets a scale that is not finite, so the damage stays visible downstream.

    Args:
        x_MK: (M, K ≥ 1) floating; half types are widened first.

    Returns:
        q_MK int8, scale_M float32, zero_M int32 in −128 … 127.
    """
    x_MK = x_MK.to(torch.float32)
    below_M = (-x_MK.amin(dim=1)).clamp_(min=0)
    scale_M = divided(x_MK.amax(dim=1).clamp_(min=0) + below_M, LEVELS)
    scale_M.masked_fill_(scale_M == 0, 1.0)
    zero_M = (below_M / scale_M).round_().nan_to_num_(nan=128.0) - 128
    q_MK = (x_MK / scale_M[:, None]).round_().add_(zero_M[:, None]).clamp_(-128, 127)
    return q_MK.nan_to_num_(nan=0.0).to(torch.int8), scale_M, zero_M.to(torch.int32)
