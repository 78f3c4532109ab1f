"""A linear layer in 8-bit floating point (Micikevicius et al., https://arxiv.org/abs/2209.05433).

Activations and weights are rounded to E4M3, gradients to E5M2, each tensor with its own scale from its current
largest magnitude; products accumulate in float32. Weights stay float32 masters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

_ALIGNMENT = 16  # the tensor cores' FP8 products need every dimension to be a multiple of it


def fp8_linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias with FP8 products forward and backward.

    Args:
        x: (…, K) floating.
        weight_NK: (N, K) float32.
        bias_N: (N,) or None.

    Returns:
        (…, N) bfloat16. Sizes that are no multiple of 16 are computed in bfloat16 instead.
    """
    x_MK = x.reshape(-1, x.shape[-1])
    if any(size % _ALIGNMENT for size in (*x_MK.shape, weight_NK.shape[0])):
        y_MN = F.linear(x_MK.to(torch.bfloat16), weight_NK.to(torch.bfloat16))
    else:
        y_MN = _Fp8Product.apply(x_MK, weight_NK)
    if bias_N is not None:
        y_MN = y_MN + bias_N.to(y_MN.dtype)
    return y_MN.reshape(*x.shape[:-1], weight_NK.shape[0])


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        x8, x_scale = _round(x_MK, torch.float8_e4m3fn)
        weight8, weight_scale = _round(weight_NK, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.dtypes = (x_MK.dtype, weight_NK.dtype)
        return _product(x8, x_scale, weight8.t(), weight_scale, torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        g8, g_scale = _round(gradients[0], torch.float8_e5m2)
        grad_x = _product(g8, g_scale, weight8, weight_scale, ctx.dtypes[0])
        grad_weight = _product(g8.t(), g_scale, x8, x_scale, ctx.dtypes[1])
        return grad_x, grad_weight


def _round(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x / scale in `dtype`, and the float32 scalar scale = amax / largest value of `dtype` (1 for zeros)."""
    amax = x.detach().abs().amax().to(torch.float32)
    scale = torch.where(amax > 0, amax / torch.finfo(dtype).max, torch.ones_like(amax))
    return (x / scale).to(dtype), scale


def _product(
    left_MK: torch.Tensor,
    left_scale: torch.Tensor,
    right_KN: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    # The tensor cores take a row-major left and a column-major right operand only.
    right = right_KN if right_KN.stride(0) == 1 else right_KN.t().contiguous().t()
    product = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(left_MK.contiguous(), right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype)
