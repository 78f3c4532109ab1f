"""Root-mean-square layer normalisation (Zhang and Sennrich, https://arxiv.org/abs/1910.07467)."""

from __future__ import annotations

import torch

from penjing.kernels.dispatch import cpu_extension


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
    if weight_K.dim() != 1 or x_MK.dim() == 0 or x_MK.shape[-1] != weight_K.shape[0]:
        raise ValueError(f"x has shape {tuple(x_MK.shape)}, weight {tuple(weight_K.shape)}; (…, K) and (K,) are needed")
    extension = cpu_extension(x_MK, weight_K)
    if extension is None or x_MK.dtype != torch.float32 or weight_K.dtype != torch.float32 or x_MK.shape[-1] == 0:
        return rms_norm_torch(x_MK, weight_K, eps)
    rows = x_MK.reshape(-1, x_MK.shape[-1])
    return extension.rms_norm(rows, weight_K.detach().contiguous(), eps).view(x_MK.shape)


def rms_norm_torch(x_MK: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """The reference of `rms_norm`; differentiable."""
    wide = x_MK.to(torch.float32)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight_K * wide.to(x_MK.dtype)
