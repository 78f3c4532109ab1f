"""Random crops, sizes and colours, mirrored images and erased squares, each as a number says that follows from (seed,
epoch, image)."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from penjing.train.data.order import mix


def moved(
    images: NDArray[np.uint8],
    random: NDArray[np.uint64],
    pad: int,
    flip: bool,
    border: Literal["constant", "edge"] = "constant",
) -> NDArray[np.uint8]:
    """Images (N, height, width, channels), each cut out of itself with a border.

    Args:
        random: (N,).
        pad: pixels of the border.
        flip: mirror left and right with probability one half.
        border: "constant" is black, "edge" goes on with the pixels of the edge.
    """
    count, height, width, _ = images.shape
    places = np.uint64(2 * pad + 1)
    rows = np.arange(height) + (random % places).astype(np.int64)[:, None]
    columns = np.arange(width) + ((random >> np.uint64(16)) % places).astype(np.int64)[:, None]
    if flip:
        mirrored = (random >> np.uint64(32)) & np.uint64(1) == 1
        columns[mirrored] = columns[mirrored][:, ::-1]
    around = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode=border)
    return around[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def erased(random: NDArray[np.uint64], height: int, width: int, side: int) -> NDArray[np.bool_]:
    """(N, height, width): a square of `side` pixels of each image, at a random place, of which a part may lie outside
    (https://arxiv.org/abs/1708.04552)."""
    top = ((random >> np.uint64(33)) % np.uint64(height)).astype(np.int64)[:, None]
    left = ((random >> np.uint64(47)) % np.uint64(width)).astype(np.int64)[:, None]
    rows, columns = np.arange(height) - top + side // 2, np.arange(width) - left + side // 2  # from the square's corner
    inside = (rows >= 0) & (rows < side), (columns >= 0) & (columns < side)
    return inside[0][:, :, None] & inside[1][:, None, :]


def boxes(random: NDArray[np.uint64], least: float) -> NDArray[np.float64]:
    """Which part of each image is shown: (N, 4), its top, left, height and width as shares of the image.

    Its area is anything from `least` to all, its height to its width anything from 3:4 to 4:3 of the image's, and its
    place anywhere (https://arxiv.org/abs/1409.4842, section 6).
    """
    area, ratio, top, left = (_uniform(random, key) for key in range(1, 5))
    area, stretch = least + (1 - least) * area, np.exp(np.log(4 / 3) * (2 * ratio - 1) / 2)
    height, width = (np.minimum(np.sqrt(area) * each, 1) for each in (stretch, 1 / stretch))
    return np.stack([top * (1 - height), left * (1 - width), height, width], 1)


def zoomed(images: NDArray[np.uint8], random: NDArray[np.uint64], least: float) -> NDArray[np.uint8]:
    """Images (N, height, width, channels), each scaled up from a part of itself; see `boxes`."""
    _, height, width, channels = images.shape
    made = np.empty_like(images)
    for index, (top, left, tall, wide) in enumerate(boxes(random, least)):
        box = (left * width, top * height, (left + wide) * width, (top + tall) * height)
        for channel in range(channels):  # one by one: images may have any number of them
            plane = Image.fromarray(np.ascontiguousarray(images[index, :, :, channel]))
            made[index, :, :, channel] = np.asarray(plane.resize((width, height), Image.Resampling.BILINEAR, box))
    return made


def coloured(images: NDArray[np.uint8], random: NDArray[np.uint64], strength: float) -> NDArray[np.uint8]:
    """Images (N, height, width, channels) lighter or darker, of more or less contrast, and of three channels more or
    less colourful, each by a factor from 1 - `strength` to 1 + `strength`."""
    light, contrast, colour = (
        (1 + strength * (2 * _uniform(random, key) - 1)).astype(np.float32)[:, None, None, None] for key in range(5, 8)
    )
    values = images.astype(np.float32) * light
    mean = values.mean((1, 2, 3), keepdims=True)
    values = mean + contrast * (values - mean)
    if images.shape[3] == 3:
        grey = values.mean(3, keepdims=True)
        values = grey + colour * (values - grey)
    return values.round().clip(0, 255).astype(np.uint8)


def _uniform(random: NDArray[np.uint64], key: int) -> NDArray[np.float64]:
    """(N,) numbers in [0, 1), other ones for each key."""
    return (mix(random, key) >> np.uint64(11)).astype(np.float64) / 2**53
