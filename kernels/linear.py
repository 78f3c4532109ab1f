"""Batch-invariant linear layer: a row's result does not depend on how many rows come with it.

A BLAS picks its loop order by the shape, so one row alone and the same row among 32 differ in the last bits (MKL:
every M below 12). Here every call to it has the same shape: tiles of TILE_M rows, the last one padded. Fewer than
LEAST_N columns are padded too: up to 8 of them take a path of MKL that depends on a row's alignment. On CUDA the Triton
language computes it, in one tile for all shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension, gpu_kernels

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LEAST_N = 16
TILE_M = 16  # 8 to 64 were equally invariant; 16 costs one row 2–3 × a plain product, and 512 rows 2 ×


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    residual_MN: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y_MN = x_MK · weight_NKᵀ + bias_N + residual_MN; row i is bit-equal whatever M.

    Args:
        x_MK: (M, K) float32, float16 or bfloat16; M may be 0. On a CPU rows are known to be invariant in float32 alone.
        weight_NK: (N, K) of the same dtype.
        bias_N: (N,) of the same dtype, or None.
        residual_MN: (M, N) of the result's dtype, or None; on a GPU added in float32 before the result is rounded.
        dtype: of the result; None: that of `x_MK`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if x_MK.dim() != 2 or weight_NK.dim() != 2 or x_MK.shape[1] != weight_NK.shape[1]:
        raise ValueError(f"x {tuple(x_MK.shape)} and weight {tuple(weight_NK.shape)} do not fit (M, K) and (N, K)")
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias_N.shape)}; ({weight_NK.shape[0]},) is needed")
    if x_MK.dtype not in FLOATS or not x_MK.dtype == weight_NK.dtype == (x_MK if bias_N is None else bias_N).dtype:
        kinds = f"x is {x_MK.dtype} and weight {weight_NK.dtype}" + ("" if bias_N is None else f", bias {bias_N.dtype}")
        raise ValueError(f"{kinds}; float32, float16 or bfloat16 is needed, of all one")
    dtype = x_MK.dtype if dtype is None else dtype
    if dtype not in FLOATS:
        raise ValueError(f"dtype={dtype}; float32, float16 or bfloat16 is needed")
    shape = (x_MK.shape[0], weight_NK.shape[0])
    if residual_MN is not None and (residual_MN.shape != shape or residual_MN.dtype != dtype):
        raise ValueError(f"residual is {tuple(residual_MN.shape)} {residual_MN.dtype}; {shape} {dtype} is needed")
    gpu = gpu_kernels("linear", x_MK, weight_NK)
    wants_gradient = torch.is_grad_enabled() and (x_MK.requires_grad or weight_NK.requires_grad)
    if gpu is not None and not wants_gradient and gpu.takes(x_MK, weight_NK):
        return gpu.linear(x_MK, weight_NK, bias_N, residual_MN, dtype)
    extension = cpu_extension(x_MK, weight_NK)
    if extension is None or x_MK.dtype != torch.float32 or 0 in weight_NK.shape:
        y_MN = linear_torch(x_MK, weight_NK, bias_N)
    else:
        bias_N = None if bias_N is None else bias_N.detach().contiguous()
        y_MN = extension.linear(x_MK, weight_NK.detach().contiguous(), bias_N)
    y_MN = y_MN if dtype == y_MN.dtype else y_MN.to(dtype)
    return y_MN if residual_MN is None else y_MN + residual_MN


def linear_torch(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` on torch."""
    out_features = weight_NK.shape[0]
    if out_features < LEAST_N:
        missing = LEAST_N - out_features
        bias_N = None if bias_N is None else F.pad(bias_N, (0, missing))
        return linear_torch(x_MK, F.pad(weight_NK, (0, 0, 0, missing)), bias_N)[:, :out_features]
    num_rows, in_features = x_MK.shape
    whole = num_rows - num_rows % TILE_M
    y_MN = x_MK.new_empty(num_rows, out_features)
    for start in range(0, whole, TILE_M):
        y_MN[start : start + TILE_M] = F.linear(x_MK[start : start + TILE_M], weight_NK, bias_N)
    if whole < num_rows:
        tile = x_MK.new_zeros(TILE_M, in_features)
        tile[: num_rows - whole] = x_MK[whole:]
        y_MN[whole:] = F.linear(tile, weight_NK, bias_N)[: num_rows - whole]
    return y_MN
