"""Batches for train's loop from a reader, shuffled and augmented as (seed, epoch, sample) say alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.train.data.order import Order, mix
from penjing.train.objective.objective import IGNORED, Batch
from penjing.train.objective.outputs import REAL, input_name
from penjing.train.sources.reader import NO_CLASS, Reader
from penjing.train.sources.settings import Augment


class SampleStream:
    """Endless micro-batches {"input.N": the network's inputs, "targets": (B,) int64, "real": (B,) bool}."""

    def __init__(
        self,
        reader: Reader,
        augment: Augment,
        *,
        batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
    ) -> None:
        self._reader, self._change = reader, augment
        self._seed = seed
        self.order = Order(len(reader), batch_size, micro_batch, rank, world_size, seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        epochs, samples = self.order.next()
        random = mix(samples.astype(np.uint64) + (epochs.astype(np.uint64) << np.uint64(40)), self._seed)
        pixels = self._reader.form.pixels
        mean = () if pixels is None else tuple(value * pixels.scale for value in pixels.mean)
        inputs, targets = self._reader.batch(samples, lambda images: augmented(images, random, self._change, mean))
        return _batch(self._reader, inputs, targets, self.order.real)

    def state_dict(self) -> dict[str, Any]:
        """The position; see `Order`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see `Order`."""
        self.order.load_state_dict(state)


def held_out_samples(reader: Reader, total: int, *, batch: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
    """One pass over the first `total` samples: this process's share, at least one batch, the last one filled up."""
    total, per_round = min(total, len(reader)), batch * world_size
    for begin in range(rank * batch, -(-total // per_round) * per_round, per_round):
        places = np.arange(begin, begin + batch)
        real = places < total
        inputs, targets = reader.batch(np.where(real, places, 0))
        yield _batch(reader, inputs, targets, real)


def augmented(
    images: NDArray[np.uint8], random: NDArray[np.uint64], settings: Augment, mean: tuple[float, ...]
) -> NDArray[np.uint8]:
    """Images (N, height, width, channels) cropped, mirrored and erased, each as its number of `random` says.

    Args:
        mean: the colour of what is erased, channel by channel, as pixels.
    """
    if not (settings.pad or settings.flip or settings.erase):
        return images
    count, height, width, _ = images.shape
    pad, places = settings.pad, 2 * settings.pad + 1
    rows = np.arange(height) + (random % np.uint64(places)).astype(np.int64)[:, None]
    columns = np.arange(width) + ((random >> np.uint64(16)) % np.uint64(places)).astype(np.int64)[:, None]
    if settings.flip:
        mirrored = (random >> np.uint64(32)) & np.uint64(1) == 1
        columns[mirrored] = columns[mirrored][:, ::-1]
    around = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    result = around[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    if settings.erase:
        top = ((random >> np.uint64(33)) % np.uint64(height)).astype(np.int64)[:, None]
        left = ((random >> np.uint64(47)) % np.uint64(width)).astype(np.int64)[:, None]
        in_rows = np.abs(np.arange(height) - top) <= settings.erase // 2
        in_columns = np.abs(np.arange(width) - left) <= settings.erase // 2
        result[in_rows[:, :, None] & in_columns[:, None, :]] = np.array(mean).round().clip(0, 255).astype(np.uint8)
    return result


def _batch(
    reader: Reader, inputs: dict[str, NDArray[Any]], targets: NDArray[np.int64], real: NDArray[np.bool_]
) -> Batch:
    batch = {
        input_name(place): torch.from_numpy(np.ascontiguousarray(inputs[spec.name]))
        for place, spec in enumerate(reader.form.inputs)
    }
    counted = real & (targets != NO_CLASS)
    return batch | {
        "targets": torch.from_numpy(np.where(counted, targets, IGNORED)),
        REAL: torch.from_numpy(real.copy()),
    }
