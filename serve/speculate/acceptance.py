"""How often guesses of each kind came true, of one answer and of all before it.

Every guess counts, also one that no step has checked: the tokens that came show what would have become of it. So a
drafter that fails costs nothing while it fails, and is noticed when it begins to hit.
"""

from __future__ import annotations

from penjing.serve.speculate.drafter import CONFIDENCES, LONGEST_MATCH, NUM_KINDS, Draft

MEMORY = 0.95  # of an answer's counts that is left after a guess: some 20 guesses count
COMMON_MEMORY = 0.999  # of the counts of all answers
LEAST_CHANCE = 0.02  # a row more costs at least 4 % of what a step of one row does
PRIOR_WEIGHT = 4.0  # guesses that the mean of all answers stands for in one answer's
FIRST_SHARES = (
    0.9,  # FORCED
    *2 * [0.1 * length for length in range(1, LONGEST_MATCH + 1)],
    *((place + 0.5) / CONFIDENCES for place in range(CONFIDENCES)),
)


class Shares:
    """Shares of guesses that came true, by kind, of all answers that choose alike."""

    def __init__(self) -> None:
        self._trials = [PRIOR_WEIGHT] * NUM_KINDS
        self._hits = [PRIOR_WEIGHT * share for share in FIRST_SHARES]

    def count(self, kind: int, hit: bool) -> None:
        self._trials[kind] = COMMON_MEMORY * self._trials[kind] + 1
        self._hits[kind] = COMMON_MEMORY * self._hits[kind] + hit

    def share(self, kind: int) -> float:
        return self._hits[kind] / self._trials[kind]


class Acceptance:
    """The same of one answer, which begins with the mean of the others."""

    def __init__(self, common: Shares) -> None:
        self._common = common
        self._trials, self._hits = [0.0] * NUM_KINDS, [0.0] * NUM_KINDS

    def observe(self, draft: Draft, came: list[int]) -> None:
        """The tokens `came` where `draft` was guessed; what follows the first miss says nothing."""
        for guessed, kind, token_id in zip(draft.token_ids, draft.kinds, came, strict=False):
            hit = guessed == token_id
            self._common.count(kind, hit)
            self._trials[kind] = MEMORY * self._trials[kind] + 1
            self._hits[kind] = MEMORY * self._hits[kind] + hit
            if not hit:
                return

    def chances(self, draft: Draft) -> list[float]:
        """For each token of `draft` the probability that it and all before it come, as far as that is worth a look."""
        chances, chance = [], 1.0
        for kind in draft.kinds:
            prior = PRIOR_WEIGHT * self._common.share(kind)
            chance *= (self._hits[kind] + prior) / (self._trials[kind] + PRIOR_WEIGHT)
            if chance < LEAST_CHANCE:
                break
            chances.append(chance)
        return chances
