"""Folders of small images that tests make up."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def photo(seed: int, size: tuple[int, int] = (20, 24), ending: str = "png") -> bytes:
    """An encoded image (height, width) of random colours around one that `seed` decides."""
    random = np.random.default_rng(seed)
    colour = random.integers(0, 256, 3)
    pixels = np.clip(colour + random.integers(-20, 21, (*size, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, {"jpg": "JPEG", "png": "PNG"}[ending])
    return file.getvalue()


def folder_of(path: Path, classes: Mapping[str, int], seed: int = 0) -> Path:
    """A folder with so many images in each class; the class "" lies in the folder itself."""
    for place, (name, count) in enumerate(classes.items()):
        (path / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (path / name / f"{number:03d}.png").write_bytes(photo(1000 * (place + seed) + number))
    return path
