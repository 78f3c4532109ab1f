"""Guesses for the running answers, step by step: made, weighed against what rows cost, and counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from penjing.serve.engine.answer import Answer
from penjing.serve.engine.sequence import Sequence
from penjing.serve.speculate.acceptance import Acceptance, Shares
from penjing.serve.speculate.drafter import NO_DRAFT, Draft, Drafter
from penjing.serve.speculate.forced import ForcedDrafter
from penjing.serve.speculate.lookup import LookupDrafter
from penjing.serve.speculate.rows import StepCosts, share_rows

MOST_GUESSES = 16  # of one answer in a step

DRAFTERS = {"lookup": LookupDrafter}


class Speculation:
    """Belongs to one engine.

    Args:
        kind: which drafter guesses; answers of a given form have what it forces guessed besides.
        costs: of steps on this machine.
    """

    def __init__(self, kind: Literal["lookup"], costs: StepCosts) -> None:
        self.costs = costs
        self._make = DRAFTERS[kind]
        # Greedy answers repeat themselves more than sampled ones.
        self._shares = {True: Shares(), False: Shares()}
        self._guessing: dict[Sequence, _Guessing] = {}

    def propose(self, running: Iterable[Sequence], answer_of: Mapping[Sequence, Answer]) -> dict[Sequence, list[int]]:
        """Tokens to check behind the last one of those of `running` that have begun and lack their next token alone."""
        answers = [
            answer_of[sequence]
            for sequence in running
            if sequence.num_output_tokens and sequence.num_computed_tokens + 1 == len(sequence.token_ids)
        ]
        guessing = [self._guessing.get(answer.sequence) or self._begin(answer) for answer in answers]
        chances = [
            each.guess(min(answer.room - 1, MOST_GUESSES)) for each, answer in zip(guessing, answers, strict=True)
        ]
        if not any(chances):
            return {}
        counts = share_rows(chances, len(answers), self.costs)
        return {
            answer.sequence: each.draft.token_ids[:count]
            for answer, each, count in zip(answers, guessing, counts, strict=True)
            if count
        }

    def forget(self, sequence: Sequence) -> None:
        """Its answer has ended."""
        self._guessing.pop(sequence, None)

    def _begin(self, answer: Answer) -> _Guessing:
        drafter: Drafter = self._make(answer.sequence.token_ids)
        if answer.constraint is not None:
            drafter = ForcedDrafter(answer.constraint, drafter)
        made = self._guessing[answer.sequence] = _Guessing(
            answer.sequence.token_ids, drafter, Acceptance(self._shares[answer.greedy])
        )
        return made


def without_drafts(ready: list[Sequence]) -> tuple[list[int], dict[Sequence, int]]:
    """Of a step's rows those that are not of drafts, and the first row of each sequence that has a draft."""
    numbers: list[int] = []
    first: dict[Sequence, int] = {}
    for number, sequence in enumerate(ready):
        if sequence in first:
            continue
        if sequence.draft:
            first[sequence] = number
        numbers.append(number)
    return numbers, first


class _Guessing:
    """One answer's drafter, how often it was right, and what it guessed last."""

    def __init__(self, token_ids: list[int], drafter: Drafter, acceptance: Acceptance) -> None:
        self._token_ids, self._drafter, self._acceptance = token_ids, drafter, acceptance
        self._begin = len(token_ids)
        self.draft: Draft = NO_DRAFT

    def guess(self, most: int) -> list[float]:
        """Learn from the last guess, make a new one, and say how likely its first tokens are to come."""
        if self.draft.token_ids:
            came = self._token_ids[self._begin : self._begin + len(self.draft.token_ids)]
            self._acceptance.observe(self.draft, came)
        self._begin = len(self._token_ids)
        self.draft = self._drafter.draft(most)
        return self._acceptance.chances(self.draft)
