"""What measured values come to: percentiles, and bootstrap intervals of the difference of two contestants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SHARES = (50, 90, 99)
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


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Milliseconds that so many percent do not exceed, by the nearest rank; nothing of nothing."""
    ordered = sorted(seconds)
    return {f"p{share}": 1000 * ordered[math.ceil(len(ordered) * share / 100) - 1] for share in SHARES if ordered}
