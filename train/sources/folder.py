"""A folder of images: a folder for each class, or images alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penjing.core.errors import InputError
from penjing.train.sources.source import Source, content_digest, is_test

RECORDING = ".wav"  # of what is heard
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_HEAD = 1 << 16
_NO_LABELS = "set data.labels = false to take the images without classes"


def image_folder(folder: Path, labels: bool) -> Source:
    """The images under `folder`, in the order of their names.

    The first folder on the way to an image is its class; under folders such as train and test it is the second.

    Args:
        labels: whether classes are read.

    Raises:
        InputError: no images; a class without images, one class alone, or images beside those of classes.
    """
    files = sorted(_images(folder))
    if not files:
        raise InputError(f"{folder} holds no images ({', '.join(sorted(SUFFIXES))}); give a folder that does")
    parts = [path.relative_to(folder).parts for path in files]
    kinds = {part[0]: is_test(part[0]) for part in parts if len(part) > 1}
    test = None
    if set(kinds.values()) == {True, False} and all(len(part) > 1 for part in parts):
        test = np.array([bool(kinds[part[0]]) for part in parts])
        classes = _classes(folder, [part[1:] for part in parts], [folder / name for name in kinds]) if labels else None
    else:
        classes = _classes(folder, parts, [folder]) if labels else None

    def digest(index: int) -> int:
        try:
            with open(files[index], "rb") as file:
                return content_digest(file.read(_HEAD), os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise InputError(f"{files[index]} cannot be read: {error.strerror}; repair or remove it") from error

    def load(index: int) -> bytes:
        try:
            return files[index].read_bytes()
        except OSError as error:
            raise InputError(f"it cannot be read: {error.strerror}") from error

    return Source(str(folder), len(files), load, lambda index: str(files[index]), digest, classes, test)


def _images(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES:
                path = Path(place) / name
                if path.exists() and not path.is_file():
                    raise InputError(f"{path} is no file, and reading a pipe or a device may never end; remove it")
                yield path


def _classes(folder: Path, parts: list[tuple[str, ...]], roots: list[Path]) -> list[str] | None:
    if all(len(part) == 1 for part in parts):
        return None
    if beside := [part[0] for part in parts if len(part) == 1]:
        raise InputError(
            f"{folder} has images in folders and {len(beside)} beside them, such as {beside[0]}, so that their class "
            f"is unknown; move them into a folder each class, or {_NO_LABELS}"
        )
    names = [part[0] for part in parts]
    found = set(names)
    for root in roots:
        for place in sorted(root.iterdir()):
            if place.is_dir() and not place.name.startswith(".") and place.name not in found:
                raise InputError(f"the class {place} has no images; fill or remove its folder, or {_NO_LABELS}")
    if len(found) == 1:
        raise InputError(
            f"{folder} has one class alone, {names[0]!r}, from which nothing can be told; add others, or {_NO_LABELS}"
        )
    return names
