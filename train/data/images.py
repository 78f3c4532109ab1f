"""Batches of labelled images, with random crops and flips that depend on (seed, epoch, image) alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.images.normalise import normalise
from penjing.train.data.augment import coloured, erased, moved, zoomed
from penjing.train.data.stream import Draw
from penjing.train.objective.objective import IGNORED, Batch

_TOGETHER = 1024


@dataclass(frozen=True)
class ImageSet:
    """`images` (N, C, H, W) uint8, `labels` (N,) whole numbers in [0, num_classes).

    Raises:
        InputError: no images, other counts, or a label out of range.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.integer[Any]]
    num_classes: int

    def __post_init__(self) -> None:
        if len(self.images) == 0 or len(self.images) != len(self.labels):
            raise InputError(
                f"the data hold {len(self.images)} images and {len(self.labels)} labels; as many of both are needed"
            )
        if self.labels.max() >= self.num_classes:
            raise InputError(
                f"the data hold label {self.labels.max()}, there are {self.num_classes} classes; "
                "check data and model.num_classes"
            )

    def first(self, count: int) -> ImageSet:
        """The first `count` images, or all."""
        return ImageSet(self.images[:count], self.labels[:count], self.num_classes)

    def statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Mean and standard deviation of each channel, (C,) each, of values in [0, 1]."""
        channels = self.images.shape[1]
        counts = np.zeros((channels, 256))  # of each value: exact, and no copy of all images as floats
        for begin in range(0, len(self.images), _TOGETHER):
            part = self.images[begin : begin + _TOGETHER]
            for channel in range(channels):
                counts[channel] += np.bincount(part[:, channel].ravel(), minlength=256)
        shares, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = shares @ values
        std = np.sqrt((shares * (values - mean[:, None]) ** 2).sum(1))
        return mean.astype(np.float32), std.astype(np.float32)


@dataclass(frozen=True)
class Images:
    """Images as `Indexed`: {"images": (B, C, H, W) float32 normalised, "targets": (B,) int64}.

    Attributes:
        mean, std: (C,) float32 each, of values in [0, 1].
        pad: pixels of zeros around an image before a random crop of its own size; 0 for none.
        flip: mirror left and right with probability one half.
        erase: side of a square set to the mean at a random place; 0 for none.
        scale: least share of an image that is shown; 1 for all of it, always.
        colour: by how much light, contrast and colours change at most; 0 for not at all.
    """

    data: ImageSet
    mean: NDArray[np.float32]
    std: NDArray[np.float32]
    pad: int = 0
    flip: bool = False
    erase: int = 0
    scale: float = 1.0
    colour: float = 0.0

    def __len__(self) -> int:
        return len(self.data.images)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        images, random = self.data.images[draw.samples], draw.random
        if random is not None:
            last = images.transpose(0, 2, 3, 1)
            if self.scale < 1:
                last = zoomed(last, random, self.scale)
            if self.pad or self.flip:
                last = moved(last, random, self.pad, self.flip)
            if self.colour:
                last = coloured(last, random, self.colour)
            images = last.transpose(0, 3, 1, 2)
        values = normalise(images, self.mean, self.std)
        if random is not None and self.erase:
            squares = erased(random, images.shape[2], images.shape[3], self.erase)
            values = np.where(squares[:, None], np.float32(0), values)
        targets = np.where(draw.real, self.data.labels[draw.samples].astype(np.int64), IGNORED)
        # Copied even where numpy sees one layout: strides of a single channel tell torch channels last.
        return {"images": torch.from_numpy(np.array(values, order="C")), "targets": torch.from_numpy(targets)}
