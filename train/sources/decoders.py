"""Images are decoded by the thread that asks, or by processes of their own, which never wait for Python's lock."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import SetupError
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import decode_image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # none of them runs another program, as EPS does
Part = tuple[float, ...] | None


def decoded(data: bytes, pixels: Pixels, part: Part, processes: int) -> NDArray[np.uint8]:
    """(height, width, channels) uint8 of an encoded image, as `pixels` fits it.

    Args:
        part: see `decode_image`.
        processes: that share the work of all threads; 0: the caller decodes.

    Raises:
        InputError: it cannot be decoded.
        SetupError: a process has ended.
    """
    if not processes:
        return _decode(data, pixels, part)
    try:
        return _pool(processes).submit(_decode, data, pixels, part).result()
    except BrokenProcessPool as error:
        _pool.cache_clear()
        raise SetupError(
            f"a process that decodes images has ended ({error}); there may be too little memory: lower data.processes"
        ) from None


def _decode(data: bytes, pixels: Pixels, part: Any) -> NDArray[np.uint8]:
    return decode_image(data, pixels, formats=FORMATS, part=part)


@cache
def _pool(processes: int) -> ProcessPoolExecutor:
    """One for all readers of this process; it ends with it. Not forked: torch's threads would be copied halfway."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
