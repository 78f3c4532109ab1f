"""Tensors in memory that streams well: aligned to 2 MiB, huge pages asked for."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence

import torch


def empty_pages(library: ctypes.CDLL, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed tensor whose pages are touched at first use; freed with its last view.

    Raises:
        MemoryError: the system has no such memory.
    """
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    size = count * dtype.itemsize
    address = library.pj_allocate(size)
    if not address:
        raise MemoryError(f"no memory for {size} bytes")
    buffer = (ctypes.c_char * size).from_address(address)
    weakref.finalize(buffer, library.pj_free, address, size)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(tuple(shape))
