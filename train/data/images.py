"""Batches of labelled images, with random crops and flips that depend on (seed, epoch, image) alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.train.data.order import Order, mix
from penjing.train.objective.objective import IGNORED, Batch


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
        values = self.images.astype(np.float32) / 255
        return values.mean((0, 2, 3)), values.std((0, 2, 3))


class ImageStream:
    """Endless micro-batches {"images": (B, C, H, W) float32 normalised, "targets": (B,) int64}.

    Args:
        mean, std: per channel, of values in [0, 1].
        pad: pixels of zeros around an image before a random crop of its own size; 0 for none.
        flip: mirror left and right with probability one half.
        erase: side of a square set to the mean at a random place; 0 for none (https://arxiv.org/abs/1708.04552).
    """

    def __init__(
        self,
        data: ImageSet,
        mean: NDArray[np.float32],
        std: NDArray[np.float32],
        *,
        batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        pad: int = 0,
        flip: bool = False,
        erase: int = 0,
    ) -> None:
        self._data = data
        self._mean, self._std = mean, std
        self._pad, self._flip, self._erase = pad, flip, erase
        self._seed = seed
        self.order = Order(len(data.images), batch_size, micro_batch, rank, world_size, seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        epochs, samples = self.order.next()
        images = normalise(self._data.images[samples], self._mean, self._std)
        if self._pad or self._flip or self._erase:
            images = self._augment(
                images, mix(samples.astype(np.uint64) + (epochs.astype(np.uint64) << np.uint64(40)), self._seed)
            )
        targets = np.where(self.order.real, self._data.labels[samples].astype(np.int64), IGNORED)
        return {"images": torch.from_numpy(images), "targets": torch.from_numpy(targets)}

    def state_dict(self) -> dict[str, Any]:
        """The position; see `Order`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see `Order`."""
        self.order.load_state_dict(state)

    def _augment(self, images: NDArray[np.float32], random: NDArray[np.uint64]) -> NDArray[np.float32]:
        count, _, height, width = images.shape
        pad, places = self._pad, 2 * self._pad + 1
        rows = np.arange(height) + (random % np.uint64(places)).astype(np.int64)[:, None]
        columns = np.arange(width) + ((random >> np.uint64(16)) % np.uint64(places)).astype(np.int64)[:, None]
        if self._flip:
            mirrored = (random >> np.uint64(32)) & np.uint64(1) == 1
            columns[mirrored] = columns[mirrored][:, ::-1]
        # The border is black before normalisation.
        black = (-self._mean / self._std)[None, :, None, None]
        padded = np.broadcast_to(black, (count, images.shape[1], height + 2 * pad, width + 2 * pad)).copy()
        padded[:, :, pad : pad + height, pad : pad + width] = images
        sample = np.arange(count)[:, None, None]
        result = padded.transpose(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]].transpose(0, 3, 1, 2)
        if self._erase:
            top = ((random >> np.uint64(33)) % np.uint64(height)).astype(np.int64)[:, None]
            left = ((random >> np.uint64(47)) % np.uint64(width)).astype(np.int64)[:, None]
            in_rows = np.abs(np.arange(height) - top) <= self._erase // 2
            in_columns = np.abs(np.arange(width) - left) <= self._erase // 2
            result = np.where((in_rows[:, None, :, None] & in_columns[:, None, None, :]), np.float32(0), result)
        # Copied even where numpy sees one layout: strides of a single channel tell torch channels last.
        return np.array(result, dtype=np.float32, order="C")


def held_out_images(
    data: ImageSet,
    mean: NDArray[np.float32],
    std: NDArray[np.float32],
    *,
    batch: int,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[Batch]:
    """One pass over `data` in order: this process's share, at least one batch, padded with ignored targets."""
    total, per_round = len(data.images), batch * world_size
    for begin in range(rank * batch, -(-total // per_round) * per_round, per_round):
        samples = np.arange(begin, begin + batch)
        real = samples < total
        samples = np.where(real, samples, 0)
        targets = torch.from_numpy(np.where(real, data.labels[samples].astype(np.int64), IGNORED))
        yield {"images": torch.from_numpy(normalise(data.images[samples], mean, std)), "targets": targets}


def normalise(images: NDArray[np.uint8], mean: NDArray[np.float32], std: NDArray[np.float32]) -> NDArray[np.float32]:
    """uint8 → float32 (value / 255 - mean) / std, per channel."""
    shape = (1, -1, 1, 1)
    return (images.astype(np.float32) / np.float32(255) - mean.reshape(shape)) / std.reshape(shape)
