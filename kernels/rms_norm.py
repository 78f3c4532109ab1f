"""Root-mean-square layer normalisation (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from penjing.kernels.dispatch import cpu_extension, gpu_kernels
from penjing.kernels.quantize import quantize_per_token


def rms_norm(x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) × weight over the last dimension, computed in float32.

    Args:
        x_MK: (…, K) floating.
        weight_K: (K,) floating.
        eps: added to the mean of squares, > 0.

    Returns:
        The shape and dtype of `x_MK` (promoted with the weight's). A row is bit-equal whatever rows come with it, for
        K < 32 768: torch splits a longer sum among threads, when it is the only one.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(x_MK, weight_K)
    gpu = gpu_kernels("rms_norm", x_MK, weight_K)
    if gpu is not None and gpu.takes(x_MK, weight_K):
        return gpu.rms_norm(x_MK, weight_K, eps)
    extension = cpu_extension(x_MK, weight_K)
    if extension is None or x_MK.dtype != torch.float32 or weight_K.dtype != torch.float32 or x_MK.shape[-1] == 0:
        return rms_norm_torch(x_MK, weight_K, eps)
    rows = x_MK.reshape(-1, x_MK.shape[-1])
    return extension.rms_norm(rows, weight_K.detach().contiguous(), eps).view(x_MK.shape)


def add_rms_norm(
    x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + residual and its `rms_norm`, on a GPU in one pass; differentiable.

    Args:
        x_MK, residual_MK: (…, K) floating, of one shape and dtype.
        weight_K, eps: see `rms_norm`.

    Returns:
        The normalised sum, as `rms_norm` returns it, and the sum, of the shape and dtype of `x_MK`.

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check(x_MK, weight_K)
    _check_residual(x_MK, residual_MK)
    gpu = gpu_kernels("rms_norm", x_MK, residual_MK, weight_K)
    if gpu is not None and gpu.takes(x_MK, weight_K):
        return gpu.add_rms_norm(x_MK, residual_MK, weight_K, eps)
    total = x_MK + residual_MK
    return rms_norm(total, weight_K, eps), total


def rms_norm_quantize(
    x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float, residual_MK: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The INT8 codes of `rms_norm(x + residual)`, as `quantize_per_token` makes them; on a GPU in one pass.

    There the norm stays in float32 until it is rounded to INT8. No gradient.

    Args:
        x_MK: (M, K) floating.
        weight_K, eps: see `rms_norm`.
        residual_MK: like `x_MK`, or None.

    Returns:
        q_MK int8, scale_M float32, and the sum x + residual (or `x_MK` itself).

    Raises:
        ValueError: shapes or types that do not fit.
    """
    _check(x_MK, weight_K)
    if x_MK.dim() != 2:
        raise ValueError(f"x has shape {tuple(x_MK.shape)}; (M, K) is needed")
    if residual_MK is not None:
        _check_residual(x_MK, residual_MK)
    gpu = gpu_kernels("rms_norm", x_MK, weight_K)
    with torch.no_grad():
        if gpu is not None and gpu.takes(x_MK, weight_K):
            return gpu.rms_norm_quantize(x_MK, weight_K, eps, residual_MK)
        total = x_MK if residual_MK is None else x_MK + residual_MK
        return *quantize_per_token(rms_norm(total, weight_K, eps)), total


def _check(x_MK: torch.Tensor, weight_K: torch.Tensor) -> None:
    if weight_K.dim() != 1 or x_MK.dim() == 0 or x_MK.shape[-1] != weight_K.shape[0]:
        raise ValueError(f"x has shape {tuple(x_MK.shape)}, weight {tuple(weight_K.shape)}; (…, K) and (K,) are needed")


def _check_residual(x_MK: torch.Tensor, residual_MK: torch.Tensor) -> None:
    if residual_MK.shape != x_MK.shape or residual_MK.dtype != x_MK.dtype or residual_MK.device != x_MK.device:
        raise ValueError(
            f"residual is {tuple(residual_MK.shape)}, {residual_MK.dtype} on {residual_MK.device}; x is "
            f"{tuple(x_MK.shape)}, {x_MK.dtype} on {x_MK.device}: they must be alike"
        )


def rms_norm_torch(x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """The reference of `rms_norm`; differentiable."""
    wide = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_K * wide.to(x_MK.dtype)
