"""How many guessed tokens a step checks: those that make the most tokens a second, by what steps have been seen to
cost."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

HURDLE = 1.03  # a step with guesses must promise so much more: the table and the chances are estimates


class StepCosts:
    """Seconds of a step by its rows, straight lines between those that were measured.

    Args:
        seconds: by rows, two at least.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        assert len(seconds) >= 2, "a line needs two points"
        self.rows = sorted(seconds)
        self.seconds: list[float] = []
        for rows in reversed(self.rows):  # fewer rows never cost more: where they seem to, something held them up
            self.seconds.insert(0, max(min([seconds[rows], *self.seconds[:1]]), 1e-9))

    @property
    def most_rows(self) -> int:
        return self.rows[-1]

    def of(self, rows: int) -> float:
        """Seconds; beyond the largest step that was measured the last line goes on."""
        right = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (low, high), (fast, slow) = self.rows[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return max(fast + (slow - fast) * (rows - low) / (high - low), self.seconds[0])


USUAL_COSTS = StepCosts({1: 6.0, 64: 69.0})
"""In rows of a large step, where nothing was measured: SmolLM2 in INT8 takes as long for what rows share as for five of
them, and a larger model for more."""


def share_rows(chances: Sequence[Sequence[float]], num_rows: int, costs: StepCosts) -> list[int]:
    """How many of each answer's guesses to check; none where that does not pay.

    Args:
        chances: of each answer, that its first guesses all come true; they fall.
        num_rows: of the step without guesses, one at least.
    """
    guesses = sorted(((-chance, i) for i, row in enumerate(chances) for chance in row))
    tokens, best, taken = float(num_rows), HURDLE * num_rows / costs.of(num_rows), 0
    most = min(len(guesses), max(costs.most_rows - num_rows, 0))
    for count, (chance, _) in enumerate(guesses[:most], start=1):
        tokens -= chance
        rate = tokens / costs.of(num_rows + count)
        if rate > best:
            best, taken = rate, count
    counts = [0] * len(chances)
    for _, i in guesses[:taken]:
        counts[i] += 1
    return counts
