"""Which combinations are measured to fit the sum: some all over the space, some near what looks best."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from penjing.compress.search.front import evenly_spread

TRIES = 200  # for each combination: a small space may hold no more that are new


def scattered(sizes: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    """Different combinations in which from few to all variables are changed: in the n-th each with a probability of
    (n + ½) / `count`, to any of its options."""
    found: dict[tuple[int, ...], None] = {}
    for number in range(count):
        generator = np.random.default_rng([seed, number])
        for _ in range(TRIES):
            changed = generator.random(len(sizes)) < (number + 0.5) / count
            drawn = [int(generator.integers(1, size)) if size > 1 else 0 for size in sizes]
            choice = tuple(option if change else 0 for option, change in zip(drawn, changed, strict=True))
            if any(choice) and choice not in found:
                found[choice] = None
                break
    return list(found)


def near_front(
    front: NDArray[np.integer], sizes: Sequence[int], count: int, seed: int, known: Container[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Points spread along a front and neighbours of such, of which none is `known`.

    Args:
        front: (points, variables), cheapest first.
    """
    found: dict[tuple[int, ...], None] = {}
    places = evenly_spread(np.arange(1.0, len(front) + 1), count)
    for number in range(count):
        generator = np.random.default_rng([seed, 1, number])
        choice = [int(each) for each in front[places[number % len(places)]]]
        for _ in range(TRIES):
            if any(choice) and tuple(choice) not in found and tuple(choice) not in known:
                found[tuple(choice)] = None
                break
            place = int(generator.integers(len(sizes)))
            choice[place] = int(generator.integers(sizes[place]))
    return list(found)
