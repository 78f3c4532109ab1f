"""8-bit integers with a scale a row as blocks of Q8_0: 32 values with a float16 scale, that of the row in each block of
it. Source: ggml-org/ggml, src/ggml-common.h."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError

BLOCK = 32
# Subnormal, but within 2⁻⁹ of a float16: SmolLM2's first v_proj, its norm folded in, has 2.4e-5.
SMALLEST_SCALE = 2.0**-16


def q8_0(weight: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """(rows, K) int8 and (rows,) → (rows, K / 32 · 34) bytes of Q8_0 blocks: float16 scale, 32 integers.

    Raises:
        InputError: K is no multiple of 32, or a scale is too large or too small for float16.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise InputError(f"a layer has {columns} inputs; Q8_0 needs a multiple of {BLOCK}: prune with round_to = 32")
    with np.errstate(over="ignore"):
        halves = scale.astype(np.float16)
    if not np.isfinite(halves).all() or (scale < SMALLEST_SCALE).any():
        raise InputError(
            f"scales of {scale.min():g} … {scale.max():g} are too large or too small for float16, as Q8_0 stores them: "
            "export --to onnx or compressed-tensors keeps them as they are"
        )
    blocks = np.empty((rows, columns // BLOCK, 2 + BLOCK), np.uint8)
    blocks[:, :, :2] = halves.view(np.uint8).reshape(rows, 1, 2)
    blocks[:, :, 2:] = weight.view(np.uint8).reshape(rows, columns // BLOCK, BLOCK)
    return blocks.reshape(rows, -1)
