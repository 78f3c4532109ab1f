"""What the difference of two contestants is worth, from pairs: bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000
CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A figure of all pairs, and the bounds between which it lies for 95 % of resampled sets of pairs."""

    value: float
    low: float
    high: float

    def shown(self) -> dict[str, float]:
        """JSON-ready."""
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap(figure: Callable[[NDArray[np.intp]], float], num_pairs: int) -> Interval:
    """The percentile interval of `figure`, which is given indices of pairs, `num_pairs` of them with repetitions.

    Efron, Bootstrap methods: another look at the jackknife, 1979.
    """
    draws = np.random.default_rng(0).integers(0, num_pairs, (RESAMPLES, num_pairs))
    figures = [figure(indices) for indices in draws]
    low, high = np.quantile(figures, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(figure(np.arange(num_pairs)), float(low), float(high))
