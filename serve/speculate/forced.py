"""Guesses for an answer that is held to a form: what the form leaves no choice about, else what may follow by it."""

from __future__ import annotations

from penjing.serve.sampling.constraint import Constraint
from penjing.serve.speculate.drafter import FORCED, NO_DRAFT, Draft, Drafter


class ForcedDrafter:
    """The tokens that `constraint` forces; where it forces none, as many of `other`'s guesses as it allows.

    A form that forces a text leaves open how it is cut into tokens, so that these too are guesses. What is left of them
    behind those that came is forced still, and to ask for it again would take ten times as long as to keep it.

    Args:
        token_ids: of prompt and answer, which others append to.
    """

    def __init__(self, token_ids: list[int], constraint: Constraint, other: Drafter) -> None:
        self._token_ids, self._constraint, self._other = token_ids, constraint, other
        self._forced: list[int] = []
        self._begin = len(token_ids)

    def draft(self, most: int) -> Draft:
        if most < 1:
            return NO_DRAFT
        came = self._token_ids[self._begin :]
        follows = came == self._forced[: len(came)]
        self._forced = (follows and self._forced[len(came) :]) or self._constraint.forced()
        self._begin = len(self._token_ids)
        if forced := self._forced[:most]:
            return Draft(forced, [FORCED] * len(forced))
        guessed = self._other.draft(most)
        if not guessed.token_ids:
            return guessed
        allowed = self._constraint.num_allowed(guessed.token_ids)
        return Draft(guessed.token_ids[:allowed], guessed.kinds[:allowed])
