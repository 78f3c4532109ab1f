"""W4A8 matrix products in the Triton language: 4-bit weights in groups of inputs, INT8 activations.

A step of a program multiplies one group, or a part of it: half bytes are widened in registers, and the sum of a group
is exact in int32. Groups are added in float32 in their order, without fused multiply-adds, so that a result has the
bits of the reference whatever the tile. Tiles are simple so far: operands come by pointers, and gates and the codes of
the next layer are launches of their own. None of it has run on a device.
"""
# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import cdiv, num_processors

LEAST_K, MOST_K = 32, 128  # inputs of an INT8 product of the tensor cores, and of a step


class Tile(NamedTuple):
    """The output tile of one program."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By falling size: the first that gives every multiprocessor a tile and is not far higher than the matrix is taken.
TILES = (Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), Tile(16, 64, 4, 4))


def tile_of(rows: int, columns: int, processors: int) -> Tile:
    """The tile for an output of rows × columns."""
    large, middle, small = TILES
    if rows > large.block_m // 2 and cdiv(rows, large.block_m) * cdiv(columns, large.block_n) >= processors:
        return large
    return middle if rows > small.block_m else small


def step_of(group: int) -> int:
    """Inputs of a step: the largest power of two that divides a group, up to MOST_K."""
    return min(group & -group, MOST_K)


def takes(q_MK: torch.Tensor, group: int) -> bool:
    """Whether the kernel can run: at least one row, groups of a multiple of 32 inputs."""
    return q_MK.shape[0] > 0 and group % LEAST_K == 0


def scaled_int4_matmul(
    q_MK: torch.Tensor,
    scale_MG: torch.Tensor,
    bytes_NK2: torch.Tensor,
    scale_GN: torch.Tensor,
    offset_GN: torch.Tensor | None,
    bias_N: torch.Tensor | None,
    residual_MN: torch.Tensor | None,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `kernels.int4_linear`; `takes(q_MK, group)` holds.

    Args:
        bytes_NK2: (N, K / 2) uint8, the earlier of two inputs in the lower half.
        scale_GN, offset_GN: (G, N), so that the columns of a tile lie side by side.
    """
    (rows, inner), columns = q_MK.shape, bytes_NK2.shape[0]
    y_MN = torch.empty(rows, columns, dtype=dtype, device=q_MK.device)
    tile = tile_of(rows, columns, num_processors(q_MK.device))
    # Row tiles come first: those that share a weight tile run side by side.
    matmul_kernel[(cdiv(rows, tile.block_m), cdiv(columns, tile.block_n))](
        q_MK,
        bytes_NK2,
        y_MN,
        scale_MG,
        scale_GN,
        offset_GN,
        bias_N,
        residual_MN,
        rows,
        columns,
        inner,
        group,
        step_of(group),
        tile.block_m,
        tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return y_MN


def variants() -> Iterator[Variant]:
    """Every tile with the groups of recipes and of other programs' folders, with offsets and without."""
    sizes = {"rows": "i32", "columns": "i32:16", "inner": "i32:16"}
    for tile in TILES:
        for group in (32, 64, 96, 128):
            for offsets in (False, True):
                for out, extra in (("fp32", {}), ("bf16", {"bias": "*fp32:16", "residual": "*bf16:16"})):
                    scale = "fp32" if offsets else "bf16"
                    pointers = {"q": "*i8:16", "weight": "*u8:16", "y": f"*{out}:16", "scale_m": "*fp32:16"}
                    pointers |= {"scale_n": f"*{scale}:16"} | ({"offset_n": f"*{scale}:16"} if offsets else {}) | extra
                    optional = ("offset_n", "bias", "residual")
                    yield Variant(
                        label=f"{tile.block_m} × {tile.block_n}, groups of {group}"
                        f"{' with offsets' if offsets else ''} to {out}",
                        kernel=matmul_kernel,
                        arguments=pointers | sizes,
                        constants={"GROUP": group, "BLOCK_K": step_of(group)}
                        | {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
                        | {name: None for name in optional if name not in pointers},
                        num_warps=tile.num_warps,
                        num_stages=tile.num_stages,
                        hot=True,
                        full=group not in (32, 64) or (out == "fp32") is (tile is not TILES[2]),
                        fused_multiply_add=False,
                    )


@triton.jit
def group_sums(q_place, weight_place, row_inside, column_inside, OFFSETS: tl.constexpr, BLOCK_K: tl.constexpr, acc):
    """`acc` and the products of BLOCK_K inputs, int32; and the sum of each row's activations."""
    a = tl.load(q_place, mask=row_inside[:, None], other=0)
    halves = tl.load(weight_place, mask=column_inside[:, None], other=0)
    codes = tl.join(halves & 15, halves >> 4).reshape(halves.shape[0], BLOCK_K).to(tl.int8)
    if not OFFSETS:
        codes -= 8
    return tl.dot(a, codes.T, acc, out_dtype=tl.int32), tl.sum(a.to(tl.int32), axis=1)


@triton.jit
def matmul_kernel(
    q,
    weight,
    y,
    scale_m,
    scale_n,
    offset_n,
    bias,
    residual,
    rows,
    columns,
    inner,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside, column_inside = row < rows, column < columns
    q_place = q + row[:, None] * inner + tl.arange(0, BLOCK_K)[None, :]
    weight_place = weight + column[:, None] * (inner // 2) + tl.arange(0, BLOCK_K // 2)[None, :]
    groups = inner // GROUP
    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for group in range(groups):
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
        total = tl.zeros((BLOCK_M,), dtype=tl.int32)
        for k in range(0, GROUP, BLOCK_K):
            place = group * GROUP + k
            acc, part = group_sums(
                q_place + place,
                weight_place + place // 2,
                row_inside,
                column_inside,
                offset_n is not None,
                BLOCK_K,
                acc,
            )
            total += part
        scale = tl.load(scale_n + group * columns + column, mask=column_inside, other=0.0).to(tl.float32)
        term = acc.to(tl.float32) * scale[None, :]
        if offset_n is not None:
            offset = tl.load(offset_n + group * columns + column, mask=column_inside, other=0.0).to(tl.float32)
            term += total.to(tl.float32)[:, None] * offset[None, :]
            term *= tl.load(scale_m + row * groups + group, mask=row_inside, other=0.0)[:, None]
        out += term
    if offset_n is None:
        out *= tl.load(scale_m + row, mask=row_inside, other=0.0)[:, None]
    if bias is not None:
        out += tl.load(bias + column, mask=column_inside, other=0.0)[None, :]
    mask = row_inside[:, None] & column_inside[None, :]
    place_out = row[:, None] * columns + column[None, :]
    if residual is not None:
        out += tl.load(residual + place_out, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + place_out, out.to(y.dtype.element_ty), mask=mask)
