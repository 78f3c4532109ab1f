"""The samples of a reader for train's loop, images augmented as (seed, epoch, sample) say alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.train.data.augment import boxes, coloured, erased, moved, zoomed
from penjing.train.data.stream import Draw
from penjing.train.objective.objective import IGNORED, Batch
from penjing.train.objective.outputs import REAL, input_name
from penjing.train.sources.reader import NO_CLASS, Reader
from penjing.train.sources.settings import Augment


@dataclass(frozen=True)
class ReadSamples:
    """What `reader` gives as `Indexed`: {"input.N": the network's inputs, "targets": (B,) int64, "real": (B,) bool}."""

    reader: Reader
    augment: Augment

    def __len__(self) -> int:
        return len(self.reader)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        pixels, random = self.reader.form.pixels, draw.random
        mean = () if pixels is None else tuple(value * pixels.scale for value in pixels.mean)

        def change(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
            rest = self.augment.model_copy(update={"scale": 1.0})  # of the files, which show more than what is fitted
            return images if random is None else augmented(images, random, rest, mean)

        shown = None if random is None or self.augment.scale == 1 else boxes(random, self.augment.scale)
        inputs, targets = self.reader.batch(draw.samples, change, shown)
        batch = {
            input_name(place): torch.from_numpy(np.ascontiguousarray(inputs[spec.name]))
            for place, spec in enumerate(self.reader.form.inputs)
        }
        counted = draw.real & (targets != NO_CLASS)
        return batch | {
            "targets": torch.from_numpy(np.where(counted, targets, IGNORED)),
            REAL: torch.from_numpy(draw.real.copy()),
        }


def augmented(
    images: NDArray[np.uint8],
    random: NDArray[np.uint64],
    settings: Augment,
    mean: tuple[float, ...],
    border: Literal["constant", "edge"] = "constant",
) -> NDArray[np.uint8]:
    """Images (N, height, width, channels) scaled, cropped, mirrored, coloured and erased, each as its
    number of `random` says.

    Args:
        mean: the colour of what is erased, channel by channel, as pixels.
        border: see `moved`.
    """
    if settings.scale < 1:
        images = zoomed(images, random, settings.scale)
    if settings.pad or settings.flip:
        images = moved(images, random, settings.pad, settings.flip, border)
    if settings.colour:
        images = coloured(images, random, settings.colour)
    if settings.erase:
        colour = np.array(mean).round().clip(0, 255).astype(np.uint8)
        squares = erased(random, images.shape[1], images.shape[2], settings.erase)
        images = np.where(squares[..., None], colour, images)
    return images
