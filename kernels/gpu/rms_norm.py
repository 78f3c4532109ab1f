# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""`rms_norm` in the Triton language: with the residual added before it and INT8 codes made after it, and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import (
    COMMON_COLUMNS,
    NAMES,
    TILES,
    Tile,
    as_rows,
    cdiv,
    num_processors,
    quantize_rows,
    takes,
    tile_of,
)

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_quantize", "takes"]

# Programs a multiprocessor in the backward pass: each sums its rows' weight gradients, and those sums are added after.
BACKWARD_PROGRAMS = 2
BACKWARD_VALUES = 16  # of a thread: of two tensors and the sum of the weight's gradients


def rms_norm(x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm`; differentiable."""
    return _RmsNorm.apply(x, None, weight_K, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_K: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rms_norm`; differentiable."""
    return _RmsNorm.apply(x, residual, weight_K, eps)


def rms_norm_quantize(
    x: torch.Tensor, weight_K: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kernels.rms_norm`: codes, scales and the sum (or `x`)."""
    q_MK, scale_M, total, _ = _forward(x, residual, weight_K, eps, quantize=True)
    return q_MK, scale_M, total


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight_K: torch.Tensor, eps: float, quantize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y or codes, scales, x + residual, 1 / root mean square); the middle ones are empty where there is nothing."""
    x_MK = as_rows(x)
    rows, columns = x_MK.shape
    tile = tile_of(columns)
    y_type = torch.int8 if quantize else torch.promote_types(x.dtype, weight_K.dtype)
    y_MK = torch.empty(rows, columns, dtype=y_type, device=x.device)
    scale_M = torch.empty(rows if quantize else 0, dtype=torch.float32, device=x.device)
    rstd_M = torch.empty(rows, dtype=torch.float32, device=x.device)
    total_MK = torch.empty_like(y_MK, dtype=x.dtype) if residual is not None else x_MK
    residual_MK = None if residual is None else as_rows(residual)
    forward_kernel[(cdiv(rows, tile.rows),)](
        x_MK,
        residual_MK,
        total_MK,
        weight_K.contiguous(),
        y_MK,
        scale_M,
        rstd_M,
        rows,
        columns,
        x_MK.stride(0),
        0 if residual_MK is None else residual_MK.stride(0),
        eps,
        quantize,
        tile.rows,
        tile.columns,
        num_warps=tile.num_warps,
    )
    return y_MK.view(x.shape), scale_M, total_MK.view(x.shape) if residual is not None else x, rstd_M


class _RmsNorm(torch.autograd.Function):
    """(x, residual or None, weight, eps) → (normalised, x + residual)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor | None, weight_K: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, _, total, rstd_M = _forward(x, residual, weight_K, eps, quantize=False)
        ctx.save_for_backward(total, weight_K, rstd_M)
        ctx.has_residual = residual is not None
        ctx.set_materialize_grads(False)
        return y, total if residual is not None else x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradient, total_gradient = gradients
        total, weight_K, rstd_M = ctx.saved_tensors
        total_gradient = total_gradient if ctx.has_residual else None
        if gradient is None:
            return total_gradient, total_gradient, None, None
        dx, weight_gradient = _backward(gradient, total_gradient, total, weight_K, rstd_M)
        return dx, dx if ctx.has_residual else None, weight_gradient, None


def _backward(
    gradient: torch.Tensor,
    total_gradient: torch.Tensor | None,
    total: torch.Tensor,
    weight_K: torch.Tensor,
    rstd_M: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    x_MK, dy_MK = as_rows(total), as_rows(gradient)
    dtotal_MK = None if total_gradient is None else as_rows(total_gradient)
    rows, columns = x_MK.shape
    tile = tile_of(columns)
    programs = min(cdiv(rows, tile.rows), BACKWARD_PROGRAMS * num_processors(x_MK.device))
    dx_MK = torch.empty(rows, columns, dtype=x_MK.dtype, device=x_MK.device)
    partial_PK = torch.empty(programs, columns, dtype=torch.float32, device=x_MK.device)
    backward_kernel[(programs,)](
        dy_MK,
        dtotal_MK,
        x_MK,
        weight_K.contiguous(),
        rstd_M,
        dx_MK,
        partial_PK,
        rows,
        columns,
        dy_MK.stride(0),
        0 if dtotal_MK is None else dtotal_MK.stride(0),
        x_MK.stride(0),
        tile.rows,
        tile.columns,
        num_warps=_backward_warps(tile),
    )
    return dx_MK.view(total.shape), partial_PK.sum(0).to(weight_K.dtype)


def _backward_warps(tile: Tile) -> int:
    return min(max(tile.num_warps, tile.rows * tile.columns // (32 * BACKWARD_VALUES)), 32)


def variants() -> Iterator[Variant]:
    """Every configuration that is launched: (x, weight) of one type, or a float32 weight."""
    pairs = [(name, name) for name in NAMES.values()] + [("bf16", "fp32"), ("fp16", "fp32")]
    for tile in TILES:
        constants = {"ROWS": tile.rows, "COLUMNS": tile.columns}
        for x, weight in pairs:
            y = "fp32" if "fp32" in (x, weight) else x
            rare = (x, weight) != ("bf16", "bf16") or tile.columns not in COMMON_COLUMNS
            for residual in (False, True):
                for quantize in (False, True):
                    yield Variant(
                        label=f"forward {tile.columns} columns {x} weight {weight}"
                        + " residual" * residual
                        + " quantize" * quantize,
                        kernel=forward_kernel,
                        arguments={"x": f"*{x}:16", "total": f"*{x}:16", "weight": f"*{weight}:16"}
                        | {"y": "*i8:16" if quantize else f"*{y}:16", "scale": "*fp32:16", "rstd": "*fp32:16"}
                        | {"rows": "i32", "columns": "i32:16", "x_stride": "i32:16", "residual_stride": "i32:16"}
                        | {"eps": "fp32"}
                        | ({"residual": f"*{x}:16"} if residual else {}),
                        constants=constants | {"QUANTIZE": quantize} | ({} if residual else {"residual": None}),
                        hot=tile.columns <= 16384,  # beyond, up to 144 bytes a thread spill
                        num_warps=tile.num_warps,
                        full=rare,
                    )
                yield Variant(
                    label=f"backward {tile.columns} columns {x} weight {weight}" + " residual" * residual,
                    kernel=backward_kernel,
                    arguments={"dy": f"*{y}:16", "x": f"*{x}:16", "weight": f"*{weight}:16", "rstd": "*fp32:16"}
                    | {"dx": f"*{x}:16", "partial": "*fp32:16", "rows": "i32", "columns": "i32:16"}
                    | {"dy_stride": "i32:16", "dtotal_stride": "i32:16", "x_stride": "i32:16"}
                    | ({"dtotal": f"*{x}:16"} if residual else {}),
                    constants=constants | ({} if residual else {"dtotal": None}),
                    hot=tile.columns <= 8192,  # beyond, a thread keeps two rows' values and spills 56 bytes and more
                    num_warps=_backward_warps(tile),
                    full=rare,
                )


@triton.jit
def forward_kernel(
    x,
    residual,
    total,
    weight,
    y,
    scale,
    rstd,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    QUANTIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
    if residual is not None:
        added = tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=mask, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(values.dtype)
        tl.store(total + place, values, mask=mask)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / columns + eps)
    tl.store(rstd + row, inverse, mask=row < rows)
    scaling = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    # As torch does: the normalised row takes the type of x before it meets the weight.
    normal = (wide * inverse[:, None]).to(values.dtype).to(tl.float32) * scaling[None, :]
    if QUANTIZE:
        codes, scales = quantize_rows(normal)
        tl.store(y + place, codes, mask=mask)
        tl.store(scale + row, scales, mask=row < rows)
    else:
        tl.store(y + place, normal.to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    dy,
    dtotal,
    x,
    weight,
    rstd,
    dx,
    partial,
    rows,
    columns,
    dy_stride,
    dtotal_stride,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    scaling = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((COLUMNS,), dtype=tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        normal = values * inverse
        weight_sum += tl.sum(gradient * normal, axis=0)
        scaled = gradient * scaling[None, :]
        out = inverse * (scaled - normal * (tl.sum(scaled * normal, axis=1) / columns)[:, None])
        if dtotal is not None:
            out += tl.load(dtotal + row[:, None] * dtotal_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * columns + column[None, :], out.to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + tl.program_id(0).to(tl.int64) * columns + column, weight_sum, mask=inside)
