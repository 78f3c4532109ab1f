"""What the kernels over rows share: the table of tiles by row length, and INT8 rounding."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_COLUMNS = 32768  # a row stays in registers: 32 values a thread in 32 warps
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

# Columns (a power of two) → rows of a tile, warps. About 2048 values a tile until one row has more: enough loads in
# flight to fill the memory's latency, and no more than 32 values a thread. An H100 quantizes rows of 4096 at 2.78 TB/s
# with 32 values a thread, at 2.74 with 16 and at 2.17 with 8.
_TILES = {
    64: (32, 4),
    128: (16, 4),
    256: (8, 4),
    512: (4, 4),
    1024: (2, 4),
    2048: (1, 4),
    4096: (1, 4),
    8192: (1, 8),
    16384: (1, 16),
    32768: (1, 32),
}

COMMON_COLUMNS = (1024, 4096)  # compiled by the default tests; the other tiles by the long ones


class Tile(NamedTuple):
    """rows × columns of one program, and its warps."""

    rows: int
    columns: int
    num_warps: int


TILES = tuple(Tile(rows, columns, warps) for columns, (rows, warps) in _TILES.items())


def tile_of(num_columns: int) -> Tile:
    """The smallest tile whose rows hold `num_columns` ≤ MAX_COLUMNS values."""
    return next(tile for tile in TILES if tile.columns >= num_columns)


def takes(*tensors: torch.Tensor) -> bool:
    """Whether kernels over rows can run on `tensors`: float types, at least one value, rows of ≤ MAX_COLUMNS."""
    return all(tensor.dtype in DTYPES and tensor.numel() > 0 and tensor.shape[-1] <= MAX_COLUMNS for tensor in tensors)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(…, K) as a matrix (M, K) whose rows are contiguous; copies only where strides do not allow a view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def cdiv(total: int, size: int) -> int:
    """How many pieces of `size` cover `total`."""
    return -(-total // size)


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 under the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit
def round_int8(x):
    """Round half to even and clamp to ±127, like `kernels.rounding`; fp32 → int8."""
    clamped = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # Adding 1.5 × 2²³ leaves no bit for a fraction: the processor's own rounding, half to even.
    return ((clamped + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def scale_of(largest, damaged):
    """The scale of rows whose largest magnitude is `largest`; NaN where `damaged`, since a maximum passes over NaN."""
    scale = tl.div_rn(largest, 127.0)
    scale = tl.where(scale == 0.0, 1.0, scale)
    return tl.where(damaged, float("nan"), scale)


@triton.jit
def has_nan(x):
    """(rows, columns) → (rows,) int1."""
    return tl.max((x != x).to(tl.int32), axis=1) > 0


@triton.jit
def quantize_rows(x):
    """(rows, columns) fp32, 0 where masked → codes int8 and scales (rows,) fp32, the bits of `quantize_per_token`."""
    scale = scale_of(tl.max(tl.abs(x), axis=1), has_nan(x))
    return round_int8(tl.div_rn(x, scale[:, None])), scale
