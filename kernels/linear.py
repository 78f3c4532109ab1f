"""Batch-invariant float32 linear layer: a row's result does not depend on how many rows come with it.

A BLAS picks its loop order by the shape, so one row alone and the same row among 32 differ in the last bits (MKL:
every M below 12). Here every call to it has the same shape: tiles of TILE_M rows, the last one padded. Fewer than
LEAST_N columns are padded too: up to 8 of them take a path of MKL that depends on a row's alignment.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from penjing.kernels.dispatch import cpu_extension

LEAST_N = 16
TILE_M = 16  # 8 to 64 were equally invariant; 16 costs one row 2–3 × a plain product, and 512 rows 2 ×


def linear(x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """y_MN = x_MK · weight_NKᵀ + bias_N; row i is bit-equal whatever M.

    Args:
        x_MK: (M, K) float32; M may be 0.
        weight_NK: (N, K) float32.
        bias_N: (N,) float32 or None.

    Raises:
        ValueError: shapes or dtypes that do not fit.
    """
    if x_MK.dim() != 2 or weight_NK.dim() != 2 or x_MK.shape[1] != weight_NK.shape[1]:
        raise ValueError(f"x {tuple(x_MK.shape)} and weight {tuple(weight_NK.shape)} do not fit (M, K) and (N, K)")
    if bias_N is not None and bias_N.shape != weight_NK.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias_N.shape)}; ({weight_NK.shape[0]},) is needed")
    if not x_MK.dtype == weight_NK.dtype == (weight_NK.dtype if bias_N is None else bias_N.dtype) == torch.float32:
        raise ValueError(f"x is {x_MK.dtype} and weight {weight_NK.dtype}; float32 is needed")
    extension = cpu_extension(x_MK, weight_NK)
    if extension is None or 0 in weight_NK.shape:
        return linear_torch(x_MK, weight_NK, bias_N)
    bias_N = None if bias_N is None else bias_N.detach().contiguous()
    return extension.linear(x_MK, weight_NK.detach().contiguous(), bias_N)


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
