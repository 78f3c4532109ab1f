"""Tokens and probabilities from rows of logits, by the compiled kernels.

`serve/sampling/sampler.py` is the reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.library import SampleRow


def sample_rows(
    extension: CpuExtension, rows: Sequence[SampleRow], logits_RV: np.ndarray, numbers: Sequence[int]
) -> None:
    """Choose or score a token for each of `rows`; the results stand in them (see `sample.h`).

    Args:
        extension: whose team shares the rows out.
        rows: their arrays must have the sizes that they say; `logits` is filled in here.
        logits_RV: float32, contiguous.
        numbers: which of its rows belongs to which of `rows`.

    Raises:
        ValueError: wrong logits.
        MemoryError: there is none for the working buffers.
    """
    if logits_RV.dtype != np.float32 or logits_RV.ndim != 2 or not logits_RV.flags.c_contiguous or not logits_RV.size:
        raise ValueError(f"logits_RV is {logits_RV.dtype} {logits_RV.shape}; contiguous float32 (R, V) is needed")
    start, stride = logits_RV.ctypes.data, logits_RV.strides[0]
    for row, number in zip(rows, numbers, strict=True):
        if not 0 <= number < len(logits_RV):
            raise ValueError(f"there is no row {number} in logits of shape {logits_RV.shape}")
        row.logits = start + number * stride
    addresses = (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, rows))
    if extension.library.pj_sample(addresses, len(rows), logits_RV.shape[1]):
        raise MemoryError("there is no memory for sampling")
