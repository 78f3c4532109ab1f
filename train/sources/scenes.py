"""Scenes of Fashion-MNIST: four things, two by two, and questions that only who sees them can answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penjing.core.progress import Progress
from penjing.train.data.fashion import CLASSES, load_fashion

SCENES = {
    "builtin:scenes": ("train", 20_000),
    "builtin:scenes-described": ("described", 40_000),
    "builtin:scenes-test": ("test", 1_000),
}
"""Name → what the scenes are for, and how many there are. Those of "test" are of Fashion-MNIST's test images."""
_SEEDS = {"train": 0, "test": 1, "described": 2}
SIDE = 56  # pixels
# Of the places 0 1 / 2 3: what is said, and which place lies there of which.
_SIDES = (
    ("left of", ((0, 1), (2, 3))),
    ("right of", ((1, 0), (3, 2))),
    ("above", ((0, 2), (1, 3))),
    ("below", ((2, 0), (3, 1))),
)


@dataclass(frozen=True)
class Scene:
    """A picture, and questions about it with their answers."""

    picture: Callable[[], NDArray[np.uint8]]  # (56, 56, 1)
    turns: tuple[tuple[str, str], ...]


def scenes(name: str, progress: Progress) -> list[Scene]:
    """The scenes of `SCENES`, the same on every machine: four things of different classes each. For learning there are
    all eight questions in an order of chance, for testing one of them; what is described is told thing by thing.

    Raises:
        InputError, SetupError: see `load_fashion`.
    """
    kind, count = SCENES[name]
    data = load_fashion("test" if kind == "test" else "train", progress)
    by_class = [np.flatnonzero(data.labels == label) for label in range(len(CLASSES))]
    random = np.random.default_rng(_SEEDS[kind])
    made = []
    for _ in range(count):
        classes = random.permutation(len(CLASSES))[:4]
        places = [int(random.choice(by_class[label])) for label in classes]
        names = [CLASSES[label].lower() for label in classes]
        if kind == "described":
            told = ", ".join(f"the {name}" for name in names)
            made.append(Scene(_picture(data.images, places), (("What is here?", f" {told}"),)))
            continue
        turns = [
            (f"What is {side} the {names[of]}?", f" the {names[there]}")
            for side, pairs in _SIDES
            for there, of in pairs
        ]
        asked = random.permutation(len(turns))[: len(turns) if kind == "train" else 1]
        made.append(Scene(_picture(data.images, places), tuple(turns[each] for each in asked)))
    return made


def _picture(images: NDArray[np.uint8], places: list[int]) -> Callable[[], NDArray[np.uint8]]:
    def picture() -> NDArray[np.uint8]:
        four = images[places, 0]
        return np.block([[four[0], four[1]], [four[2], four[3]]])[:, :, None]

    return picture
