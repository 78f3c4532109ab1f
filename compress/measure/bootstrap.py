"""Confidence intervals by the percentile bootstrap (Efron, https://doi.org/10.1214/aos/1176344552): the mean over
samples drawn again, with replacement, from those that were measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.95


def resampled_means(
    strata: Sequence[NDArray[np.float64]], *, resamples: int = 2000, seed: int = 0
) -> NDArray[np.float64]:
    """Means over all samples of `resamples` bootstrap draws, (resamples,); each stratum is drawn by itself.

    Args:
        strata: (n,) values each, n ≥ 1, such as the losses of windows of prose and those of code.
        seed: the same draws for the same seed and counts, so that two intervals are compared and not two seeds.
    """
    generator = np.random.default_rng(seed)
    total, count = np.zeros(resamples), 0
    for values in strata:
        # Drawing n samples is drawing how often each distinct value comes: 0 and 1 for 10 000 images.
        distinct, counts = np.unique(values, return_counts=True)
        total += generator.multinomial(len(values), counts / len(values), size=resamples) @ distinct
        count += len(values)
    return total / count


def interval(means: NDArray[np.float64], level: float = LEVEL) -> tuple[float, float]:
    """The central part of `means` that holds `level` of them."""
    low, high = np.quantile(means, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)
