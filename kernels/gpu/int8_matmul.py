"""INT8 matrix products in the Triton language.

W8A8: a persistent grid walks output tiles in groups that share operands in the L2 cache; operands come by tensor
descriptor (TMA), sums run in int32, and scales, bias, SwiGLU, residual and INT8 output are applied to the tile before
it is written. W8A16, for a few rows: the weight is read once, in INT8, and widened in registers.
"""
# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import cdiv, num_processors, round_int8
from penjing.kernels.gpu.swiglu import gated

K_MULTIPLE = 16  # bytes: strides of a tensor descriptor
GROUP = 8  # row tiles that are walked before the next column tile
MAX_GEMV_ROWS = 16
HALF_TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
GEMV = {"BLOCK_N": 16, "BLOCK_K": 256}
GEMV_WARPS, GEMV_STAGES = 4, 5


class Tile(NamedTuple):
    """The output tile of one program and its inner step; sums of 128 × 256 take 128 registers of 256 threads."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By falling size: the first that gives every multiprocessor a tile and is not far higher than the matrix is taken.
TILES = (
    Tile(128, 256, 128, 8, 4),
    Tile(128, 128, 128, 8, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 64, 256, 4, 4),
    Tile(16, 64, 256, 4, 4),
)


def tile_of(rows: int, columns: int, processors: int, with_residual: bool) -> Tile:
    """The tile for an output of rows × columns."""
    for tile in (
        TILES[1:-1] if with_residual else TILES[:-1]
    ):  # 128 × 256 with a residual would spill 120 bytes a thread
        fits = rows > tile.block_m // 2
        if fits and cdiv(rows, tile.block_m) * cdiv(columns, tile.block_n) >= processors:
            return tile
    return TILES[-2] if rows > 16 else TILES[-1]


def takes(q_MK: torch.Tensor, weight_NK: torch.Tensor) -> bool:
    """Whether the W8A8 kernel can run: at least one row, K a multiple of 16, aligned rows."""
    return (
        q_MK.shape[0] > 0
        and q_MK.shape[1] % K_MULTIPLE == 0
        and all(x.is_contiguous() and x.data_ptr() % K_MULTIPLE == 0 for x in (q_MK, weight_NK))
    )


def int8_matmul(q_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """The int32 sums; see `kernels.int8_linear`."""
    out_MN = torch.empty(q_MK.shape[0], weight_NK.shape[0], dtype=torch.int32, device=q_MK.device)
    _launch(q_MK, weight_NK, out_MN, None, None, None, None, None, swiglu=False)
    return out_MN


def scaled_int8_matmul(
    q_MK: torch.Tensor,
    scale_M: torch.Tensor,
    weight_NK: torch.Tensor,
    scale_N: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual: torch.Tensor | None,
    swiglu: bool,
    output_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `kernels.int8_linear`."""
    columns = weight_NK.shape[0] // 2 if swiglu else weight_NK.shape[0]
    out_type = dtype if output_scale is None else torch.int8
    out_MN = torch.empty(q_MK.shape[0], columns, dtype=out_type, device=q_MK.device)
    _launch(q_MK, weight_NK, out_MN, scale_M, scale_N, bias_N, residual, output_scale, swiglu)
    return out_MN


def _launch(
    q_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    scale_M: torch.Tensor | None,
    scale_N: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    swiglu: bool,
) -> None:
    (rows, inner), columns = q_MK.shape, out_MN.shape[1]
    processors = num_processors(q_MK.device)
    tile = tile_of(rows, weight_NK.shape[0], processors, residual is not None)
    block_n = tile.block_n // 2 if swiglu else tile.block_n
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, block_n)
    matmul_kernel[(min(tiles, processors),)](
        TensorDescriptor.from_tensor(q_MK, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight_NK, [block_n, tile.block_k]),
        out_MN,
        scale_M,
        scale_N,
        bias_N,
        residual,
        output_scale,
        rows,
        columns,
        inner,
        swiglu,
        tile.block_m,
        block_n,
        tile.block_k,
        GROUP,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def takes_gemv(x_MK: torch.Tensor) -> bool:
    """Whether the W8A16 kernel can run: 1 … MAX_GEMV_ROWS rows of a half type."""
    return 0 < x_MK.shape[0] <= MAX_GEMV_ROWS and x_MK.dtype in HALF_TYPES


def int8_weight_linear(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, scale_N: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    """See `kernels.int8_linear`; `takes_gemv(x_MK)` holds."""
    x_MK = x_MK.contiguous()
    (rows, inner), columns = x_MK.shape, weight_NK.shape[0]
    y_MN = torch.empty(rows, columns, dtype=x_MK.dtype, device=x_MK.device)
    gemv_kernel[(cdiv(columns, GEMV["BLOCK_N"]),)](
        x_MK,
        weight_NK,
        scale_N,
        bias_N,
        y_MN,
        rows,
        columns,
        inner,
        BLOCK_M=MAX_GEMV_ROWS,
        **GEMV,
        num_warps=GEMV_WARPS,
        num_stages=GEMV_STAGES,
    )
    return y_MN


def variants() -> Iterator[Variant]:
    """Every tile with every epilogue that the stack uses, and the W8A16 kernel."""
    vectors = {"scale_m": "*fp32:16", "scale_n": "*fp32:16"}
    epilogues: dict[str, dict[str, str]] = {
        "int32": {"out": "*i32:16"},
        "fp32": vectors | {"out": "*fp32:16"},
        "bf16 bias residual": vectors | {"out": "*bf16:16", "bias": "*fp32:16", "residual": "*bf16:16"},
        "bf16 swiglu": vectors | {"out": "*bf16:16"},
        "i8 swiglu": vectors | {"out": "*i8:16", "output_scale": "*fp32:16"},
        "i8 bias": vectors | {"out": "*i8:16", "bias": "*fp32:16", "output_scale": "*fp32:16"},
    }
    sizes = {"rows": "i32", "columns": "i32:16", "inner": "i32:16"}
    optional = ("scale_m", "scale_n", "bias", "residual", "output_scale")
    for tile in TILES:
        for name, pointers in epilogues.items():
            if "residual" in name and tile is TILES[0]:
                continue
            swiglu = "swiglu" in name
            block_n = tile.block_n // 2 if swiglu else tile.block_n
            operands = {
                "a_desc": f"tensordesc<i8[{tile.block_m}, {tile.block_k}]>",
                "b_desc": f"tensordesc<i8[{block_n}, {tile.block_k}]>",
            }
            yield Variant(
                label=f"W8A8 {tile.block_m} × {tile.block_n} × {tile.block_k} to {name}",
                kernel=matmul_kernel,
                arguments=operands | pointers | sizes,
                constants={"SWIGLU": swiglu, "BLOCK_M": tile.block_m, "BLOCK_N": block_n, "BLOCK_K": tile.block_k}
                | {"GROUP": GROUP}
                | {argument: None for argument in optional if argument not in pointers},
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                hot=True,
                full=name in ("int32", "i8 bias") or tile not in (TILES[0], TILES[4]),
            )
    for name in HALF_TYPES.values():
        yield Variant(
            label=f"W8A16 {name}",
            kernel=gemv_kernel,
            arguments={"x": f"*{name}:16", "weight": "*i8:16", "scale_n": "*fp32:16", "y": f"*{name}:16"} | sizes,
            constants=GEMV | {"BLOCK_M": MAX_GEMV_ROWS, "bias": None},
            num_warps=GEMV_WARPS,
            num_stages=GEMV_STAGES,
            hot=True,
        )


@triton.jit
def scaled(acc, factor_M, scale_n, bias, column, inside):
    """acc × scale_m × scale_n + bias in fp32, in the order of the reference."""
    out = acc.to(tl.float32) * factor_M[:, None]
    out *= tl.load(scale_n + column, mask=inside, other=0.0)[None, :]
    if bias is not None:
        out += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    return out


@triton.jit
def matmul_kernel(
    a_desc,
    b_desc,
    out,
    scale_m,
    scale_n,
    bias,
    residual,
    output_scale,
    rows,
    columns,
    inner,
    SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        group = tile // (GROUP * column_tiles)
        height = tl.minimum(row_tiles - group * GROUP, GROUP)
        first_m = (group * GROUP + tile % (GROUP * column_tiles) % height) * BLOCK_M
        first_n = tile % (GROUP * column_tiles) // height * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        acc_up = acc
        for k in range(0, inner, BLOCK_K):
            a = a_desc.load([first_m, k])
            acc = tl.dot(a, b_desc.load([first_n, k]).T, acc, out_dtype=tl.int32)
            if SWIGLU:
                # The rows of `up` follow those of `gate`.
                acc_up = tl.dot(a, b_desc.load([columns + first_n, k]).T, acc_up, out_dtype=tl.int32)
        row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        inside = column < columns
        mask = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        if scale_m is None:
            tl.store(out + place, acc, mask=mask)
        else:
            factor_M = tl.load(scale_m + row, mask=row < rows, other=0.0)
            y = scaled(acc, factor_M, scale_n, bias, column, inside)
            if SWIGLU:
                y = gated(y, scaled(acc_up, factor_M, scale_n, bias, columns + column, inside))
            if residual is not None:
                y += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
            if output_scale is not None:
                tl.store(out + place, round_int8(tl.div_rn(y, tl.load(output_scale))), mask=mask)
            else:
                tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gemv_kernel(
    x,
    weight,
    scale_n,
    bias,
    y,
    rows,
    columns,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    x_place = x + row[:, None] * inner + lane[None, :]
    weight_place = weight + column.to(tl.int64)[:, None] * inner + lane[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inner, BLOCK_K):
        inside = (k + lane < inner)[None, :]
        values = tl.load(x_place + k, mask=(row < rows)[:, None] & inside, other=0.0)
        codes = tl.load(weight_place + k, mask=(column < columns)[:, None] & inside, other=0)
        acc = tl.dot(values, codes.to(values.dtype).T, acc, input_precision="ieee")
    acc *= tl.load(scale_n + column, mask=column < columns, other=0.0)[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], acc.to(y.dtype.element_ty), mask=mask)
