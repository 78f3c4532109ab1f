"""Thresholds that keep what they promise, by split conformal prediction (Angelopoulos and Bates, arXiv 2107.07511)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def upper_threshold(scores_N: NDArray[np.float64], share: float) -> tuple[float, float]:
    """A value that a new score exceeds with the probability `share` at most, and the probability that is promised.

    Args:
        scores_N: (N ≥ 1,) of examples that nothing was learned from, and that are like those to come: in any order of
            all of them each is as likely to be the largest. Fewer than 1 / share - 1 of them cannot promise `share`:
            then the largest is the threshold, and 1 / (N + 1) is promised.
    """
    count = len(scores_N)
    rank = min(count, math.ceil((count + 1) * (1 - share) - 1e-9))
    return float(np.sort(scores_N)[rank - 1]), 1 - rank / (count + 1)


def enough_for(share: float) -> int:
    """How many scores `upper_threshold` needs to promise `share`."""
    return math.ceil(1 / share - 1 - 1e-9)
