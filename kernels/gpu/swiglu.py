# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""`swiglu` in the Triton language: forward, backward, and with INT8 codes of its rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import COMMON_COLUMNS, DTYPES, NAMES, TILES, as_rows, cdiv, quantize_rows, tile_of
from penjing.kernels.gpu.rows import takes as takes_rows

__all__ = ["swiglu", "swiglu_quantize", "takes", "takes_rows"]

COLUMNS, NUM_WARPS = 1024, 4  # of one program: 16 bytes a thread in half precision, one row


def takes(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether `swiglu` can run on these: of one float type, at least one value."""
    return gate.dtype == up.dtype and gate.dtype in DTYPES and gate.numel() > 0 and gate.dim() > 0


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """See `kernels.swiglu`; differentiable."""
    return _SwiGlu.apply(gate, up)


def swiglu_quantize(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.swiglu`; `takes_rows(gate, up)` holds."""
    gate_MK, up_MK = as_rows(gate), as_rows(up)
    rows, columns = gate_MK.shape
    tile = tile_of(columns)
    q_MK = torch.empty(rows, columns, dtype=torch.int8, device=gate.device)
    scale_M = torch.empty(rows, dtype=torch.float32, device=gate.device)
    quantize_kernel[(cdiv(rows, tile.rows),)](
        gate_MK,
        up_MK,
        q_MK,
        scale_M,
        rows,
        columns,
        gate_MK.stride(0),
        up_MK.stride(0),
        tile.rows,
        tile.columns,
        num_warps=tile.num_warps,
    )
    return q_MK.view(gate.shape), scale_M


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        gate_MK, up_MK = as_rows(gate), as_rows(up)
        y_MK = torch.empty(gate_MK.shape, dtype=gate.dtype, device=gate.device)
        forward_kernel[_grid(gate_MK)](
            gate_MK, up_MK, y_MK, gate_MK.shape[1], gate_MK.stride(0), up_MK.stride(0), COLUMNS, num_warps=NUM_WARPS
        )
        return y_MK.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        gate_MK, up_MK, dy_MK = as_rows(gate), as_rows(up), as_rows(gradients[0])
        dgate_MK = torch.empty(gate_MK.shape, dtype=gate.dtype, device=gate.device)
        dup_MK = torch.empty_like(dgate_MK)
        backward_kernel[_grid(gate_MK)](
            dy_MK,
            gate_MK,
            up_MK,
            dgate_MK,
            dup_MK,
            gate_MK.shape[1],
            dy_MK.stride(0),
            gate_MK.stride(0),
            up_MK.stride(0),
            COLUMNS,
            num_warps=NUM_WARPS,
        )
        return dgate_MK.view(gate.shape), dup_MK.view(up.shape)


def _grid(x_MK: torch.Tensor) -> tuple[int, int]:
    return x_MK.shape[0], cdiv(x_MK.shape[1], COLUMNS)


def variants() -> Iterator[Variant]:
    """Every configuration that is launched."""
    strides = {"gate_stride": "i32:16", "up_stride": "i32:16"}
    for name in NAMES.values():
        pointers = {"gate": f"*{name}:16", "up": f"*{name}:16"}
        more = {"num_warps": NUM_WARPS, "hot": True}
        yield Variant(
            label=f"forward {name}",
            kernel=forward_kernel,
            arguments=pointers | strides | {"y": f"*{name}:16", "columns": "i32:16"},
            constants={"COLUMNS": COLUMNS},
            **more,
        )
        yield Variant(
            label=f"backward {name}",
            kernel=backward_kernel,
            arguments=pointers
            | strides
            | {"dy": f"*{name}:16", "dgate": f"*{name}:16", "dup": f"*{name}:16"}
            | {"columns": "i32:16", "dy_stride": "i32:16"},
            constants={"COLUMNS": COLUMNS},
            **more,
        )
        for tile in TILES:
            yield Variant(
                label=f"quantize {tile.columns} columns {name}",
                kernel=quantize_kernel,
                arguments=pointers | strides | {"q": "*i8:16", "scale": "*fp32:16", "rows": "i32", "columns": "i32:16"},
                constants={"ROWS": tile.rows, "COLUMNS": tile.columns},
                num_warps=tile.num_warps,
                hot=tile.columns <= 16384,
                full=name != "bf16" or tile.columns not in COMMON_COLUMNS,
            )


@triton.jit
def gated(gate, up):
    """silu(gate) × up in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def forward_kernel(gate, up, y, columns, gate_stride, up_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    left = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, gated(left, right).to(y.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(dy, gate, up, dgate, dup, columns, dy_stride, gate_stride, up_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < columns
    gradient = tl.load(dy + row * dy_stride + column, mask=mask, other=0.0).to(tl.float32)
    left = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-left))
    slope = sigmoid * (1.0 + left * (1.0 - sigmoid))
    place = row * columns + column
    tl.store(dgate + place, (gradient * right * slope).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + place, (gradient * left * sigmoid).to(dup.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(
    gate, up, q, scale, rows, columns, gate_stride, up_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    left = tl.load(gate + row[:, None] * gate_stride + column[None, :], mask=mask, other=0.0)
    right = tl.load(up + row[:, None] * up_stride + column[None, :], mask=mask, other=0.0)
    # Rounded to the type that `swiglu` would have written, so that both ways give the same codes.
    y = gated(left.to(tl.float32), right.to(tl.float32)).to(left.dtype).to(tl.float32)
    codes, scales = quantize_rows(y)
    tl.store(q + row[:, None] * columns + column[None, :], codes, mask=mask)
    tl.store(scale + row, scales, mask=row < rows)
