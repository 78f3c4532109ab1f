"""How many guessed tokens a step checks: those that make the most tokens a second, by what steps have been seen to
cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

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
        self._seconds = [self.seconds[0]] * self.rows[0]  # of 0, 1, 2 … rows
        for (low, high), (fast, slow) in zip(pairwise(self.rows), pairwise(self.seconds), strict=True):
            self._further = (slow - fast) / (high - low)
            self._seconds += [fast + self._further * (rows - low) for rows in range(low, high)]
        self._seconds.append(self.seconds[-1])
        least, self._least = float("inf"), [0.0] * len(self._seconds)
        for rows in reversed(range(self.rows[0], self.most_rows)):
            least = min(least, self._seconds[rows + 1] - self._seconds[rows])
            self._least[rows] = HURDLE * rows / self._seconds[rows] * least

    @property
    def most_rows(self) -> int:
        return self.rows[-1]

    def of(self, rows: int) -> float:
        """Seconds; beyond the largest step that was measured the last line goes on."""
        if rows <= self.most_rows:
            return self._seconds[rows]
        return self.seconds[-1] + self._further * (rows - self.most_rows)

    def least_chance(self, num_rows: int) -> float:
        """A guess that is less likely does not pay in a step that has `num_rows` without guesses: its row costs more,
        however many others there are."""
        return self._least[num_rows] if num_rows < self.most_rows else 1.0


USUAL_COSTS = StepCosts({1: 6.0, 64: 69.0})
"""In rows of a large step, where nothing was measured: SmolLM2 in INT8 takes as long for what rows share as for five of
them, and a larger model for more."""


def share_rows(chances: Sequence[Sequence[float]], num_rows: int, costs: StepCosts) -> list[int]:
    """How many of each answer's guesses to check; none where that does not pay.

    Args:
        chances: of each answer, that its first guesses all come true; they fall.
        num_rows: of the step without guesses, one at least.
    """
    counts = [0] * len(chances)
    guesses = sorted(((-chance, i) for i, row in enumerate(chances) for chance in row))
    tokens, best, taken = float(num_rows), HURDLE * num_rows / costs.of(num_rows), 0
    most = min(len(guesses), max(costs.most_rows - num_rows, 0))
    for count, (chance, _) in enumerate(guesses[:most], start=1):
        tokens -= chance
        rate = tokens / costs.of(num_rows + count)
        if rate > best:
            best, taken = rate, count
    for _, i in guesses[:taken]:
        counts[i] += 1
    return counts
