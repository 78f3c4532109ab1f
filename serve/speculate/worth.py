"""Whether to ask a network that takes time also when none of its guesses is checked."""

from __future__ import annotations

from collections.abc import Sequence

from penjing.serve.speculate.rows import StepCosts

MEMORY = 0.95  # of the mean of what it saved and took that is left after a step
PAUSE = 16  # steps, in each of which a guess that is made for nothing costs less than a tenth


class Worth:
    """Asks a step in seventeen while asking has taken more than it saved."""

    def __init__(self) -> None:
        self._balance, self._left = 0.0, 0

    @property
    def pays(self) -> bool:
        """False while asking only finds out whether it would pay again."""
        return self._balance >= 0

    def ask(self) -> bool:
        """Whether to ask in this step."""
        if self._left:
            self._left -= 1
            return False
        return True

    def note(self, saved: float, took: float) -> None:
        """Seconds that guesses of this step are expected to save, and that making them took."""
        self._balance = MEMORY * self._balance + (1 - MEMORY) * (saved - took)
        if not self.pays:
            self._left = PAUSE


def saved_seconds(chances: Sequence[float], num_rows: int, costs: StepCosts) -> float:
    """What a step saves by checking guesses: their tokens cost no step of their own, but the step is longer.

    Args:
        chances: of the guesses that are checked.
        num_rows: of the step without them.
    """
    alone = costs.of(num_rows)
    return sum(chances) * alone / num_rows - (costs.of(num_rows + len(chances)) - alone)
