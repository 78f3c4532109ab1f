"""8-bit gradients in the Triton language: a chunk is read once, hashed counters round it."""
# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import DTYPES, NAMES, cdiv

USUAL_CHUNKS = (512, 2048, 8192)


def takes(gradient: torch.Tensor) -> bool:
    """Whether the kernel can run: a float type, at least one value."""
    return gradient.dtype in DTYPES and gradient.numel() > 0


def num_warps_of(chunk: int) -> int:
    """16 values a thread at most."""
    return max(1, min(chunk // 512, 32))


def quantize_gradient(gradient: torch.Tensor, seed: int, chunk: int) -> torch.Tensor:
    """See `kernels.quantize_gradient`."""
    values = gradient.detach().reshape(-1)
    num_values = values.numel()
    num_chunks = cdiv(num_values, chunk)
    packed = torch.empty(num_chunks * (chunk + 4), dtype=torch.uint8, device=values.device)
    codes, scale = packed[: num_chunks * chunk].view(torch.int8), packed[num_chunks * chunk :].view(torch.float32)
    pack_kernel[(num_chunks,)](values, codes, scale, num_values, seed, chunk, num_warps=num_warps_of(chunk))
    return packed


def dequantize_gradient(packed_WB: torch.Tensor, num_values: int, chunk: int) -> torch.Tensor:
    """See `kernels.quantize_gradient`."""
    num_chunks = cdiv(num_values, chunk)
    mean = torch.empty(num_values, dtype=torch.float32, device=packed_WB.device)
    unpack_kernel[(num_chunks,)](
        packed_WB.view(torch.int8),
        packed_WB.view(torch.float32),
        mean,
        num_values,
        len(packed_WB),
        num_chunks,
        chunk,
        num_warps=num_warps_of(chunk),
    )
    return mean


def variants() -> Iterator[Variant]:
    """The configurations for the usual chunks."""
    for chunk in USUAL_CHUNKS:
        common: dict[str, Any] = {
            "constants": {"CHUNK": chunk},
            "num_warps": num_warps_of(chunk),
            "full": chunk != 2048,
        }
        for name in NAMES.values():
            yield Variant(
                label=f"pack {name} in chunks of {chunk}",
                kernel=pack_kernel,
                arguments={"values": f"*{name}:16", "codes": "*i8:16", "scale": "*fp32:16"}
                | {"num_values": "i64", "seed": "i64"},
                hot=True,
                **common,
            )
        yield Variant(
            label=f"unpack chunks of {chunk}",
            kernel=unpack_kernel,
            arguments={"codes": "*i8:16", "scale": "*fp32:16", "mean": "*fp32:16"}
            | {"num_values": "i64", "rows": "i32", "num_chunks": "i64"},
            hot=chunk <= 2048,
            **common,
        )


@triton.jit
def hash32(x):
    """lowbias32, as in the reference; uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["seed"])
def pack_kernel(values, codes, scale, num_values, seed, CHUNK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(values + place, mask=place < num_values, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), axis=0)
    factor = tl.div_rn(largest, 127.0)
    factor = tl.where(factor == 0.0, 1.0, factor)
    damaged = (tl.max((x != x).to(tl.int32), axis=0) > 0) | (factor == float("inf"))
    low, high = place.to(tl.uint32), (place >> 32).to(tl.uint32)
    key = hash32(seed.to(tl.uint32))
    draw = hash32(hash32(low ^ (high * 0x9E3779B9)) ^ key)
    up = (draw >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2⁻²⁴
    code = tl.floor(tl.div_rn(x, factor) + up)
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    code = tl.where(damaged, 0.0, code)
    tl.store(codes + place, code.to(tl.int8))
    tl.store(scale + chunk, tl.where(damaged, float("nan"), factor))


@triton.jit
def unpack_kernel(codes, scale, mean, num_values, rows, num_chunks, CHUNK: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    row_bytes = num_chunks * (CHUNK + 4)
    total = tl.zeros((CHUNK,), dtype=tl.float32)
    for row in range(rows):
        start = row * row_bytes
        factor = tl.load(scale + start // 4 + num_chunks * (CHUNK // 4) + chunk)
        total += tl.load(codes + start + chunk * CHUNK + lane).to(tl.float32) * factor
    place = chunk * CHUNK + lane
    tl.store(mean + place, tl.div_rn(total, tl.zeros_like(total) + rows), mask=place < num_values)
