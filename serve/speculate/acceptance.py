"""How often guesses of each kind came true, of one answer and of all before it.

Every guess counts, also one that no step has checked: the tokens that came show what would have become of it. So a
drafter that fails costs nothing while it fails, and is noticed when it begins to hit.
"""

from __future__ import annotations

from penjing.serve.speculate.drafter import CONFIDENCES, NUM_KINDS, Draft

MEMORY = 0.95  # of an answer's counts that is left after a guess: some 20 guesses count
COMMON_MEMORY = 0.999  # of the counts of all answers
LEAST_CHANCE = 0.02  # a row more costs at least 4 % of what a step of one row does
PRIOR_WEIGHT = 4.0  # guesses that the mean of all answers stands for in one answer's
UNKNOWN = 4.0, 4.0  # guesses that had to come and did, before a token tells anything
MOST_TOKENS = 1 << 16  # that are told apart, in some 20 MB
SUREST = 0.99
FIRST_SHARES = (
    0.9,  # FORCED
    # Of matches of 1 to 8 tokens, of those that agree, and of those that differ.
    *2 * [0.3, 0.5, 0.57, 0.7, 0.75, 0.8, 0.85, 0.9, 0.65, 0.75, 0.15, 0.2],
    *((place + 0.5) / CONFIDENCES for place in range(CONFIDENCES)),
)


class Shares:
    """Shares of guesses that came true, of all answers that choose alike: by kind, and by token how much oftener than
    that. A text is left at the end of a sentence, and hardly within a word."""

    def __init__(self) -> None:
        self.trials = [PRIOR_WEIGHT] * NUM_KINDS
        self.hits = [PRIOR_WEIGHT * share for share in FIRST_SHARES]
        self.forget_tokens()

    def forget_tokens(self) -> None:
        # Guesses of each token, and behind each: how many had to come by their kinds, and how many did.
        self.of, self.behind = dict[int, tuple[float, float]](), dict[int, tuple[float, float]]()

    def count(self, kind: int, before: int, guessed: int, chance: float, hit: bool) -> None:
        """`guessed` was guessed behind `before` and came, or not; by its kind it had this chance."""
        self.trials[kind] = COMMON_MEMORY * self.trials[kind] + 1
        self.hits[kind] = COMMON_MEMORY * self.hits[kind] + hit
        if max(len(self.of), len(self.behind)) > MOST_TOKENS:
            self.forget_tokens()
        expected, came = self.of.get(guessed, UNKNOWN)
        self.of[guessed] = expected + chance, came + hit
        expected, came = self.behind.get(before, UNKNOWN)
        self.behind[before] = expected + chance, came + hit


class Acceptance:
    """The same of one answer, which begins with the mean of the others."""

    def __init__(self, common: Shares) -> None:
        self._common = common
        self._trials, self._hits = [0.0] * NUM_KINDS, [0.0] * NUM_KINDS
        self._chance = [hits / trials for hits, trials in zip(common.hits, common.trials, strict=True)]  # of each kind

    def observe(self, before: int, draft: Draft, came: list[int]) -> None:
        """The tokens `came` behind `before` where `draft` was guessed; what follows the first miss says nothing."""
        common = self._common
        for guessed, kind, token_id in zip(*draft, came, strict=False):
            hit = guessed == token_id
            common.count(kind, before, guessed, self._chance[kind], hit)
            trials = self._trials[kind] = MEMORY * self._trials[kind] + 1
            hits = self._hits[kind] = MEMORY * self._hits[kind] + hit
            share = common.hits[kind] / common.trials[kind]
            self._chance[kind] = (hits + PRIOR_WEIGHT * share) / (trials + PRIOR_WEIGHT)
            if not hit:
                return
            before = guessed

    def chances(self, before: int, draft: Draft, least: float = LEAST_CHANCE) -> list[float]:
        """For each token of `draft` the probability that it and all before it come behind `before`, as far as that is
        not below `least`."""
        of, behind, chances, chance = self._common.of, self._common.behind, list[float](), 1.0
        for guessed, kind in zip(*draft, strict=True):
            expected, came = of.get(guessed, UNKNOWN)
            expected_behind, came_behind = behind.get(before, UNKNOWN)
            chance *= min(self._chance[kind] * came * came_behind / (expected * expected_behind), SUREST)
            if chance < least:
                break
            chances.append(chance)
            before = guessed
        return chances
