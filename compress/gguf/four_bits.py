"""4-bit layers of an artifact as the blocks of GGUF that hold them exactly: Q4_0, Q4_1 or Q4_K.

    Q4_0  18 bytes for 32 values  scale × (u − 8)           scale in float16
    Q4_1  20 bytes for 32 values  scale × u + offset        both in float16
    Q4_K  144 bytes for 256       d × s × u − m × l         d, m in float16, s and l of each 32 in 6 bits

u from 0 to 15 is the artifact's own integer. A group of more than 32 inputs is written as several blocks with the same
scale. Source: ggml-org/ggml, src/ggml-common.h and ggml-quants.c; `core/foreign/gguf_blocks.py` reads the same back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError

BLOCK, SUPER = 32, 256
PARTS = SUPER // BLOCK  # of a block of Q4_K, each with a scale and a minimum of its own
MIDDLE = 8.0
LARGEST = 63  # of 6 bits

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def four_bit_blocks(packed: NDArray[np.int32], scale: Floats, offset: Floats | None, name: str) -> tuple[Bytes, str]:
    """Bytes (rows, …) of the smallest blocks that hold a layer exactly, and the name of their type.

    Args:
        packed: (rows, K / 8) words of `kernels.int4_linear.pack_int4`.
        scale, offset: (rows, G), of K / G inputs each, a multiple of 32; without offsets values lie around zero.
        name: of the layer, for messages.

    Raises:
        InputError: none of the three holds it.
    """
    repeats = packed.shape[1] * 8 // BLOCK // scale.shape[1]
    scale = scale.repeat(repeats, axis=1)
    offset = -MIDDLE * scale if offset is None else offset.repeat(repeats, axis=1)
    values = _values(packed)
    scale_16, offset_16 = _half(scale), _half(offset)
    if scale_16 is not None and np.array_equal(offset, -MIDDLE * scale):
        return _q4_0(values, scale_16), "Q4_0"
    if scale_16 is not None and offset_16 is not None:
        return _q4_1(values, scale_16, offset_16), "Q4_1"
    steps, floors = (_six_bits(x) if x.shape[1] % PARTS == 0 else None for x in (scale, -offset))
    if steps is not None and floors is not None:
        return _q4_k(values, steps, floors), "Q4_K"
    raise InputError(
        f"{name} has scales of {abs(scale).min():g} … {abs(scale).max():g} and offsets from {offset.min():g} to "
        f"{offset.max():g} that float16 does not hold, as Q4_0 and Q4_1 store them, nor 6 bits of a float16 for each "
        "256 inputs, as Q4_K does: export --to compressed-tensors-weights keeps them where zero points are whole"
    )


def near_halves(x: Floats) -> Floats:
    """`x` rounded to float16, where that keeps 11 bits of each value; else as it is. A row's scale that was learnt has
    more, and what whole numbers make of it is rounded as the scale of a Q8_0 block is."""
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16).astype(np.float32)
        near = np.abs(halves - x) <= np.abs(x) / 2**11
    return halves if near.all() else x


def _values(packed: NDArray[np.int32]) -> Bytes:
    """(rows, K / 32, 32) from 0 to 15."""
    rows, words = packed.shape
    pairs = np.ascontiguousarray(packed).view(np.uint8).reshape(rows, words // 4, 16)  # two neighbours, the first low
    return np.stack([pairs & 15, pairs >> 4], axis=3).reshape(rows, words // 4, BLOCK).astype(np.uint8)


def _half(x: Floats) -> NDArray[np.float16] | None:
    """`x` in float16; None where that would change it."""
    with np.errstate(over="ignore"):
        halves = x.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), x) else None


def _q4_0(values: Bytes, scale: NDArray[np.float16]) -> Bytes:
    return _joined([_bytes(scale), _halves(values)])


def _q4_1(values: Bytes, scale: NDArray[np.float16], offset: NDArray[np.float16]) -> Bytes:
    return _joined([_bytes(scale), _bytes(offset), _halves(values)])


def _q4_k(values: Bytes, steps: tuple[NDArray[np.float16], Bytes], floors: tuple[NDArray[np.float16], Bytes]) -> Bytes:
    (step, steps_6), (floor, floors_6) = steps, floors
    last = (steps_6[..., 4:] & 15) | (floors_6[..., 4:] & 15) << 4
    first = [each[..., :4] | (each[..., 4:] >> 4) << 6 for each in (steps_6, floors_6)]
    pairs = values.reshape(len(values), -1, PARTS // 2, 2, BLOCK)  # the low halves of 32 bytes, then the high ones
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*step.shape, SUPER // 2)
    return _joined([_bytes(step), _bytes(floor), *[each.astype(np.uint8) for each in (*first, last, nibbles)]])


def _six_bits(x: Floats) -> tuple[NDArray[np.float16], Bytes] | None:
    """(rows, G) → (rows, G / 8) float16 and (rows, G / 8, 8) whole numbers from 0 to 63 whose products are `x`; None
    where there are none such."""
    parts = x.reshape(len(x), -1, PARTS).astype(np.float64)
    largest = np.take_along_axis(parts, abs(parts).argmax(axis=2)[..., None], axis=2)[..., 0]
    unit, whole = np.zeros(largest.shape, np.float16), np.zeros(parts.shape, np.uint8)
    open_ = largest != 0
    for count in range(LARGEST, 0, -1):  # the largest is so many units
        with np.errstate(over="ignore"):
            candidate = (largest / count).astype(np.float16)
        candidate[~np.isfinite(candidate)] = 0
        wide = candidate.astype(np.float64)
        counts = np.divide(parts, wide[..., None], out=np.zeros_like(parts), where=wide[..., None] != 0).round()
        exact = (counts * wide[..., None] == parts) & (counts >= 0) & (counts <= LARGEST)
        found = open_ & (wide != 0) & exact.all(axis=2)
        unit[found], whole[found] = candidate[found], counts[found].astype(np.uint8)
        open_ &= ~found
    return None if open_.any() else (unit, whole)


def _halves(values: Bytes) -> Bytes:
    """16 bytes a block, whose low halves are its first 16 values."""
    return (values[..., :16] | values[..., 16:] << 4).astype(np.uint8)


def _bytes(halves: NDArray[np.float16]) -> Bytes:
    return np.ascontiguousarray(halves).view(np.uint8).reshape(*halves.shape, 2)


def _joined(parts: list[Bytes]) -> Bytes:
    blocks = np.concatenate(parts, axis=2)
    return blocks.reshape(len(blocks), -1)
