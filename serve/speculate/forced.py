"""Guesses for an answer that is held to a form: what the form leaves no choice about, else what may follow by it."""

from __future__ import annotations

from penjing.serve.sampling.constraint import Constraint
from penjing.serve.speculate.drafter import FORCED, NO_DRAFT, Draft, Drafter


class ForcedDrafter:
    """The tokens that `constraint` forces; where it forces none, as many of `other`'s guesses as it allows.

    A form that forces a text leaves open how it is cut into tokens, so that these too are guesses.
    """

    def __init__(self, constraint: Constraint, other: Drafter) -> None:
        self._constraint, self._other = constraint, other

    def draft(self, most: int) -> Draft:
        if most < 1:
            return NO_DRAFT
        if forced := self._constraint.forced()[:most]:
            return Draft(forced, [FORCED] * len(forced))
        guessed = self._other.draft(most)
        if not guessed.token_ids:
            return guessed
        allowed = self._constraint.num_allowed(guessed.token_ids)
        return Draft(guessed.token_ids[:allowed], guessed.kinds[:allowed])
