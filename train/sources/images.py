"""All images of a source at a network's size, as our own classifiers learn and are judged: decoded once, in memory, or
in a file without a name where they would take more than half of what is free."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penjing.core.cache import cache_dir
from penjing.core.errors import InputError
from penjing.core.files import check_room, writing
from penjing.core.graph.config import Pixels, TensorSpec
from penjing.core.memory import available_bytes
from penjing.core.progress import Progress, megabytes, once
from penjing.train.data.images import ImageSet
from penjing.train.data.order import permute
from penjing.train.sources.open import open_source
from penjing.train.sources.reader import Form, Reader
from penjing.train.sources.settings import SourceSettings

_TOGETHER = 64
_MOST_CLASSES = 1 << 20  # that are numbered: each has a name


@dataclass(frozen=True)
class Wanted:
    """How images are fitted, and the names of the classes; none: those of the source."""

    pixels: Pixels
    names: tuple[str, ...] = ()


def class_names(settings: SourceSettings) -> tuple[str, ...]:
    """The classes of a source, in order.

    Raises:
        InputError: it has none, or too large numbers for them.
    """
    source = open_source(settings)
    if source.labels is None:
        raise InputError(f"{source.where} has no classes; give a folder with a folder for each class")
    if all(isinstance(label, int) for label in source.labels):
        if (last := max(map(int, source.labels))) >= _MOST_CLASSES:
            raise InputError(
                f"{source.where} has class {last}, and classes are numbered from 0 on, below {_MOST_CLASSES:,}; give "
                "names, or smaller numbers"
            )
        return tuple(map(str, range(last + 1)))
    return tuple(sorted({str(label) for label in source.labels}))


def load_images(
    settings: SourceSettings, wanted: Wanted, held_out: float, split: str, most: int, progress: Progress
) -> ImageSet:
    """At most `most` images of the "train" or "test" half of a source with classes, mixed, fitted as wanted.

    Args:
        held_out: share that is for testing, see `Source.halves`; 0 and "test": all.

    Raises:
        InputError: see `open_source` and `Reader`; or it has no classes.
        SetupError: the images fit neither into half of the memory nor on the disk.
    """
    source = open_source(settings)
    names = wanted.names or class_names(settings)
    indices = source.halves(held_out)[0] if split == "train" else source.judged(held_out)
    pixels = wanted.pixels
    channels, height, width = len(pixels.mean), pixels.height, pixels.width
    spec = TensorSpec(name="images", dtype="float32", shape=("batch", channels, height, width))
    digits = names == tuple(map(str, range(len(names))))
    reader = Reader(
        source, indices, Form((spec,), pixels, len(names), () if digits else names), settings, once(progress)
    )
    if reader.targets is None:
        raise InputError(f"{source.where} has no classes, which a classifier needs; make a folder for each class")
    count = min(most, len(reader))
    order = permute(np.arange(count, dtype=np.uint64), len(reader), 0)
    progress.start(f"reading images of {source.where}", -(-count // _TOGETHER))
    images = _room((count, channels, height, width), progress)
    labels = np.empty(count, np.int64)
    for begin in range(0, count, _TOGETHER):
        found, targets = reader.images(order[begin : begin + _TOGETHER])
        images[begin : begin + len(found)] = found.transpose(0, 3, 1, 2)
        labels[begin : begin + len(found)] = targets
        progress.advance()
    return ImageSet(images, labels, len(names))


def _room(shape: tuple[int, ...], progress: Progress) -> NDArray[np.uint8]:
    """Room for images (N, C, H, W): memory, or a file that vanishes with this process.

    Raises:
        SetupError: the disk is full.
    """
    size = int(np.prod(shape))
    if size <= 0.5 * available_bytes():
        return np.empty(shape, np.uint8)
    folder = cache_dir() / "images"
    progress.note(
        f"{shape[0]} images of {shape[2]} × {shape[3]} take {megabytes(size)}, more than half of the free memory: "
        f"they are kept in a file in {folder}, which vanishes at the end"
    )
    with writing(folder / "images"):
        folder.mkdir(parents=True, exist_ok=True)
        check_room(folder / "images", size)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(size)
            return np.memmap(file, np.uint8, "r+", shape=shape)
