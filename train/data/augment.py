"""Random crops, mirrored images and erased squares, each as a number says that follows from (seed, epoch, image)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def moved(images: NDArray[np.uint8], random: NDArray[np.uint64], pad: int, flip: bool) -> NDArray[np.uint8]:
    """Images (N, height, width, channels), each cut out of itself with a black border.

    Args:
        random: (N,).
        pad: pixels of the border.
        flip: mirror left and right with probability one half.
    """
    count, height, width, _ = images.shape
    places = np.uint64(2 * pad + 1)
    rows = np.arange(height) + (random % places).astype(np.int64)[:, None]
    columns = np.arange(width) + ((random >> np.uint64(16)) % places).astype(np.int64)[:, None]
    if flip:
        mirrored = (random >> np.uint64(32)) & np.uint64(1) == 1
        columns[mirrored] = columns[mirrored][:, ::-1]
    around = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    return around[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def erased(random: NDArray[np.uint64], height: int, width: int, side: int) -> NDArray[np.bool_]:
    """(N, height, width): a square of each image, at a random place, of which a part may lie outside
    (https://arxiv.org/abs/1708.04552)."""
    top = ((random >> np.uint64(33)) % np.uint64(height)).astype(np.int64)[:, None]
    left = ((random >> np.uint64(47)) % np.uint64(width)).astype(np.int64)[:, None]
    rows = np.abs(np.arange(height) - top) <= side // 2
    columns = np.abs(np.arange(width) - left) <= side // 2
    return rows[:, :, None] & columns[:, None, :]
