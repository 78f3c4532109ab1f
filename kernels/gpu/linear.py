# Launch options are outside the Triton language's type hints:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""`linear` in the Triton language: one tile whatever the number of rows, so that a row rounds alike in any batch.

A BLAS picks its tile, and with it the order of the sum, by the shape. For a few rows reading the weight takes the time,
whatever the tile; for many, larger tiles would be faster: serving INT8 models does not come here but for the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import DTYPES, NAMES, cdiv

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64
WARPS, STAGES = 4, 4
FLOAT32_BLOCK_K = 32  # twice the bytes


def takes(x_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Whether the kernel can run: one float type, at least one value, rows of the weight without gaps."""
    return x_MK.dtype in DTYPES and weight_NK.stride(1) == 1 and 0 not in (*x_MK.shape, weight_NK.shape[0])


def linear(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual_MN: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `kernels.linear`; `takes(x_MK, weight_NK)` holds."""
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    (rows, inner), columns = x_MK.shape, weight_NK.shape[0]
    y_MN = torch.empty(rows, columns, dtype=dtype, device=x_MK.device)
    linear_kernel[(cdiv(rows, BLOCK_M), cdiv(columns, BLOCK_N))](
        x_MK,
        weight_NK,
        bias_N,
        None if residual_MN is None else residual_MN.contiguous(),
        y_MN,
        rows,
        columns,
        inner,
        x_MK.stride(0),
        weight_NK.stride(0),
        BLOCK_M,
        BLOCK_N,
        block_k(x_MK.dtype),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return y_MN


def block_k(dtype: torch.dtype) -> int:
    """Columns of a tile's inner step."""
    return FLOAT32_BLOCK_K if dtype == torch.float32 else BLOCK_K


def variants() -> Iterator[Variant]:
    """Plain, with the residual added, and to float32 logits."""
    for dtype, name in NAMES.items():
        for label, extra in (("", {}), (" bias residual", {"bias": f"*{name}:16", "residual": f"*{name}:16"})):
            for out in dict.fromkeys((name, name if extra else "fp32")):
                yield Variant(
                    label=f"{name} to {out}{label}",
                    kernel=linear_kernel,
                    arguments={"x": f"*{name}:16", "weight": f"*{name}:16", "y": f"*{out}:16", "rows": "i32"}
                    | dict.fromkeys(("columns", "inner", "x_stride", "weight_stride"), "i32:16")
                    | extra,
                    constants={"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "BLOCK_K": block_k(dtype)}
                    | ({} if extra else {"bias": None, "residual": None}),
                    num_warps=WARPS,
                    num_stages=STAGES,
                    hot=name != "fp32",
                    full=name == "fp16",
                )


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    residual,
    y,
    rows,
    columns,
    inner,
    x_stride,
    weight_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Row tiles come first: those that share a weight tile run side by side.
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    x_place = x + row[:, None] * x_stride + lane[None, :]
    weight_place = weight + column[:, None] * weight_stride + lane[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        inside = (k + lane < inner)[None, :]
        a = tl.load(x_place + k, mask=(row < rows)[:, None] & inside, other=0.0)
        b = tl.load(weight_place + k, mask=(column < columns)[:, None] & inside, other=0.0)
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    if residual is not None:
        acc += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + place, acc.to(y.dtype.element_ty), mask=mask)
