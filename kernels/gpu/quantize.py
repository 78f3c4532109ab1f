# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""`quantize_per_token` in the Triton language: a row is read once and stays in registers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import COMMON_COLUMNS, NAMES, TILES, as_rows, cdiv, quantize_rows, takes, tile_of

__all__ = ["quantize_per_token", "takes"]


def quantize_per_token(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.quantize`; `takes(x_MK)` holds."""
    x_MK = as_rows(x_MK)
    rows, columns = x_MK.shape
    tile = tile_of(columns)
    q_MK = torch.empty(rows, columns, dtype=torch.int8, device=x_MK.device)
    scale_M = torch.empty(rows, dtype=torch.float32, device=x_MK.device)
    quantize_kernel[(cdiv(rows, tile.rows),)](
        x_MK, q_MK, scale_M, rows, columns, x_MK.stride(0), tile.rows, tile.columns, num_warps=tile.num_warps
    )
    return q_MK, scale_M


def variants() -> Iterator[Variant]:
    """Every configuration that is launched."""
    for tile in TILES:
        for name in NAMES.values():
            yield Variant(
                label=f"{tile.columns} columns {name}",
                kernel=quantize_kernel,
                arguments={"x": f"*{name}:16", "q": "*i8:16", "scale": "*fp32:16"}
                | {"rows": "i32", "columns": "i32:16", "x_stride": "i32:16"},
                constants={"ROWS": tile.rows, "COLUMNS": tile.columns},
                num_warps=tile.num_warps,
                hot=True,
                full=name == "fp32" or tile.columns not in COMMON_COLUMNS,
            )


@triton.jit
def quantize_kernel(x, q, scale, rows, columns, x_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    codes, scales = quantize_rows(values)
    tl.store(q + row[:, None] * columns + column[None, :], codes, mask=mask)
    tl.store(scale + row, scales, mask=row < rows)
