"""Grouped products over rows sorted by expert, in the Triton language, with dispatch, combination and all gradients.

Each expert keeps its own weight tensor: kernels get a table of pointers. A program finds its expert from the table of
row offsets, so that no size has to reach the host; the grid is the largest that any split of the rows can need.
"""
# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import DTYPES, NAMES, cdiv

COLUMNS, ROW_WARPS = 1024, 4  # of dispatch and combination


class Tile(NamedTuple):
    """Output tile, inner step, warps and stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


HALF_TILE, FLOAT_TILE = Tile(64, 128, 64, 4, 4), Tile(32, 32, 32, 4, 2)  # float32 multiplies without tensor cores


def tile_of(dtype: torch.dtype) -> Tile:
    """The tile for operands of `dtype`."""
    return FLOAT_TILE if dtype == torch.float32 else HALF_TILE


def takes(x_TE: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels can run: contiguous, aligned weights of the type and device of x."""
    return x_TE.dtype in DTYPES and all(
        w.dtype == x_TE.dtype and w.device == x_TE.device and w.is_contiguous() and w.data_ptr() % 16 == 0
        for w in weights
    )


def grouped_linear(x_RE: torch.Tensor, offsets_N1: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """y[r] = weights[n] · x[r] for offsets[n] ≤ r < offsets[n + 1]; differentiable in x and the weights."""
    return _GroupedLinear.apply(x_RE, offsets_N1, *weights)


def dispatch(x_TE: torch.Tensor, token_R: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """x[token[r]]; differentiable without atomics: token t's rows are place[t]."""
    return _Dispatch.apply(x_TE, token_R, place_TK)


def combine(y_RE: torch.Tensor, weight_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
    """Σ_k weight[t, k] × y[place[t, k]]; differentiable in both."""
    return _Combine.apply(y_RE, weight_TK, place_TK)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RE: torch.Tensor, offsets_N1: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_RE, offsets_N1, *weights)
        return _product(x_RE.contiguous(), offsets_N1, weights, transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RE, offsets_N1, *weights = ctx.saved_tensors
        dy = gradients[0].contiguous()
        dx = _product(dy, offsets_N1, weights, transposed=True) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[2:]):
            return dx, None, *[None] * len(weights)
        return dx, None, *_weight_gradient(dy, x_RE.contiguous(), offsets_N1, weights).unbind(0)


def _product(
    x_RK: torch.Tensor, offsets_N1: torch.Tensor, weights: Sequence[torch.Tensor], transposed: bool
) -> torch.Tensor:
    rows, inner = x_RK.shape
    out_features, in_features = weights[0].shape
    columns = in_features if transposed else out_features
    tile = tile_of(x_RK.dtype)
    y = torch.empty(rows, columns, dtype=x_RK.dtype, device=x_RK.device)
    tiles_N = (offsets_N1.diff() + tile.block_m - 1) // tile.block_m
    grid = (cdiv(rows, tile.block_m) + len(weights), cdiv(columns, tile.block_n))
    product_kernel[grid](
        x_RK,
        torch.tensor([weight.data_ptr() for weight in weights], device=x_RK.device),
        y,
        offsets_N1,
        tiles_N.cumsum(0).to(torch.int32),
        len(weights),
        columns,
        inner,
        1 if transposed else in_features,
        in_features if transposed else 1,
        triton.next_power_of_2(len(weights)),
        *tile[:3],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def _weight_gradient(
    dy_RO: torch.Tensor, x_RI: torch.Tensor, offsets_N1: torch.Tensor, weights: Sequence[torch.Tensor]
) -> torch.Tensor:
    out_features, in_features = weights[0].shape
    tile = tile_of(x_RI.dtype)
    gradient = torch.empty(len(weights), out_features, in_features, dtype=x_RI.dtype, device=x_RI.device)
    grid = (len(weights), cdiv(out_features, tile.block_m), cdiv(in_features, tile.block_n))
    weight_gradient_kernel[grid](
        dy_RO,
        x_RI,
        gradient,
        offsets_N1,
        out_features,
        in_features,
        *tile[:3],
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return gradient


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TE: torch.Tensor, token_R: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(place_TK)
        return x_TE.index_select(0, token_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _combined(gradients[0].contiguous(), None, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_RE: torch.Tensor, weight_TK: torch.Tensor, place_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y_RE, weight_TK, place_TK)
        return _combined(y_RE.contiguous(), weight_TK.contiguous(), place_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_RE, weight_TK, place_TK = ctx.saved_tensors
        y_RE, dout_TE, weight_TK = y_RE.contiguous(), gradients[0].contiguous(), weight_TK.contiguous()
        dy_RE, dweight_TK = torch.empty_like(y_RE), torch.empty_like(weight_TK)
        combine_backward_kernel[(place_TK.numel(),)](
            dout_TE,
            y_RE,
            weight_TK,
            place_TK,
            dy_RE,
            dweight_TK,
            place_TK.shape[1],
            y_RE.shape[1],
            COLUMNS,
            num_warps=ROW_WARPS,
        )
        return dy_RE, dweight_TK, None


def _combined(y_RE: torch.Tensor, weight_TK: torch.Tensor | None, place_TK: torch.Tensor) -> torch.Tensor:
    tokens, chosen = place_TK.shape
    columns = y_RE.shape[1]
    out = torch.empty(tokens, columns, dtype=y_RE.dtype, device=y_RE.device)
    grid = (tokens, cdiv(columns, COLUMNS))
    combine_kernel[grid](y_RE, weight_TK, place_TK, out, chosen, columns, COLUMNS, num_warps=ROW_WARPS)
    return out


def variants() -> Iterator[Variant]:
    """Every kernel by type, and the product for the forward and the backward layout of weights."""
    for dtype, name in NAMES.items():
        tile, pointer = tile_of(dtype), f"*{name}:16"
        blocks = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
        options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        options |= {"hot": dtype != torch.float32, "full": name == "fp16"}
        for label, stride, unit in (("forward", "stride_n", "stride_k"), ("backward", "stride_k", "stride_n")):
            yield Variant(
                label=f"grouped product {label} {name}",
                kernel=product_kernel,
                arguments={"x": pointer, "weights": "*i64:16", "y": pointer, "offsets": "*i32:16", "ends": "*i32:16"}
                | {"experts": "i32", "columns": "i32:16", "inner": "i32:16", stride: "i32:16"},
                constants=blocks | {"EXPERTS": 64, unit: 1},
                **options,
            )
        yield Variant(
            label=f"weight gradient {name}",
            kernel=weight_gradient_kernel,
            arguments={"dy": pointer, "x": pointer, "gradient": pointer, "offsets": "*i32:16"}
            | {"out_features": "i32:16", "in_features": "i32:16"},
            constants=blocks,
            **options,
        )
        rows: dict[str, Any] = {"num_warps": ROW_WARPS, "hot": True, "full": name != "bf16"}
        common = {"y": pointer, "place": "*i64:16", "chosen": "i32", "columns": "i32:16"}
        for weight in ("fp32", None):
            yield Variant(
                label=f"combine {name} weights {weight}",
                kernel=combine_kernel,
                arguments=common | {"out": pointer} | ({"weight": f"*{weight}:16"} if weight else {}),
                constants={"COLUMNS": COLUMNS} | ({} if weight else {"weight": None}),
                **rows,
            )
        yield Variant(
            label=f"combine backward {name}",
            kernel=combine_backward_kernel,
            arguments=common | {"dout": pointer, "dy": pointer, "weight": "*fp32:16", "dweight": "*fp32:16"},
            constants={"COLUMNS": COLUMNS},
            **rows,
        )


@triton.jit
def product_kernel(
    x,
    weights,
    y,
    offsets,
    ends,
    experts,
    columns,
    inner,
    stride_n,
    stride_k,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    end = tl.load(ends + index, mask=index < experts, other=2147483647)  # tiles of experts 0 … index
    expert = tl.sum((end <= tile).to(tl.int32), axis=0)
    if expert < experts:
        earlier = tl.max(tl.where(end <= tile, end, 0), axis=0)
        stop = tl.load(offsets + expert + 1)
        row = (tl.load(offsets + expert) + (tile - earlier) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        lane = tl.arange(0, BLOCK_K)
        address = tl.load(weights + expert).to(tl.pointer_type(x.dtype.element_ty))
        weight = tl.multiple_of(address, 16) + lane[:, None] * stride_k + column.to(tl.int64)[None, :] * stride_n
        values = x + row[:, None] * inner + lane[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, inner, BLOCK_K):
            inside = k + lane < inner
            a = tl.load(values + k, mask=(row < stop)[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight + k * stride_k, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        mask = (row < stop)[:, None] & (column < columns)[None, :]
        tl.store(y + row[:, None] * columns + column[None, :], acc.to(y.dtype.element_ty), mask=mask)


@triton.jit
def weight_gradient_kernel(
    dy,
    x,
    gradient,
    offsets,
    out_features,
    in_features,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    start, stop = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    out = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(start, stop, BLOCK_K):
        row = (first + lane).to(tl.int64)
        inside = row < stop
        mask = (out < out_features)[:, None] & inside[None, :]
        a = tl.load(dy + row[None, :] * out_features + out[:, None], mask=mask, other=0.0)
        mask = inside[:, None] & (column < in_features)[None, :]
        b = tl.load(x + row[:, None] * in_features + column[None, :], mask=mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    place = (expert * out_features + out[:, None]) * in_features + column[None, :]
    mask = (out < out_features)[:, None] & (column < in_features)[None, :]
    tl.store(gradient + place, acc.to(gradient.dtype.element_ty), mask=mask)


@triton.jit
def combine_kernel(y, weight, place, out, chosen, columns, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for k in range(chosen):
        row = tl.load(place + token * chosen + k)
        part = tl.load(y + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        if weight is not None:
            part *= tl.load(weight + token * chosen + k).to(tl.float32)
        total += part
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine_backward_kernel(dout, y, weight, place, dy, dweight, chosen, columns, COLUMNS: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    token = pair // chosen
    row = tl.load(place + pair)
    share = tl.load(weight + pair).to(tl.float32)
    lane = tl.arange(0, COLUMNS)
    product = tl.zeros((COLUMNS,), dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        mask = start + lane < columns
        upstream = tl.load(dout + token * columns + start + lane, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(y + row * columns + start + lane, mask=mask, other=0.0).to(tl.float32)
        product += upstream * value
        tl.store(dy + row * columns + start + lane, (upstream * share).to(dy.dtype.element_ty), mask=mask)
    tl.store(dweight + pair, tl.sum(product, axis=0).to(dweight.dtype.element_ty))
