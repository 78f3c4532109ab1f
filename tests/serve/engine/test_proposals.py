"""What is proposed step by step, and how often an answer is asked; no model runs."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.engine.sequence import Sequence
from penjing.serve.engine.speculation import MOST_PAUSE, Speculation
from penjing.serve.speculate.drafter import LONGEST_MATCH, Draft
from penjing.serve.speculate.lookup import LookupDrafter
from penjing.serve.speculate.rows import StepCosts
from tests.serve.speculate.searched import Searched

COSTS = StepCosts({1: 1.0, 5: 1.25, 9: 1.6, 16: 2.6, 32: 4.2})


class Answering:
    """Stands in for an answer of 80 tokens at most."""

    def __init__(self, prompt: list[int], greedy: bool, fork_of: Sequence | None = None) -> None:
        self.sequence = Sequence("r", prompt, fork_of=fork_of)
        self.greedy, self.constraint = greedy, None

    @property
    def room(self) -> int:
        return 80 - self.sequence.num_output_tokens

    def take(self, token_ids: list[int]) -> None:
        self.sequence.token_ids += token_ids
        self.sequence.num_computed_tokens = len(self.sequence.token_ids) - 1


class Service:
    """Answers that come, fork, are preempted, go on and end, by a number; what was proposed in each step."""

    def __init__(self, seed: int) -> None:
        self.random, self.speculation = Random(seed), Speculation(COSTS)
        self.answer_of: dict[Sequence, Answering] = {}
        self.proposed: list[list[list[int]]] = []

    def run(self, num_steps: int) -> list[list[list[int]]]:
        for _ in range(num_steps):
            if len(self.answer_of) < 4 and self.random.random() < 0.4:
                self._begin()
            preempted = [each for each in self.answer_of if self.random.random() < 0.1]
            for sequence in preempted:  # they are computed again, and lack more than their next token meanwhile
                sequence.num_computed_tokens = self.random.randrange(len(sequence.token_ids) - 1)
            running = [each for each in self.answer_of if each not in preempted or self.random.random() < 0.5]
            drafts = self.speculation.propose(running, cast(Any, self.answer_of))
            assert not drafts.keys() & {*preempted}
            self.proposed.append([drafts.get(each, []) for each in self.answer_of])
            for sequence in list(self.answer_of):
                self._step(sequence, drafts.get(sequence, []))
            if self.random.random() < 0.02:
                self.speculation.forget_told()
        return self.proposed

    def _begin(self) -> None:
        prompt = [self.random.randrange(5) for _ in range(self.random.randrange(1, 30))]
        greedy = self.random.random() < 0.5
        first = Answering(prompt, greedy)
        forks = [Answering(prompt, greedy, first.sequence) for _ in range(self.random.choice([0, 0, 2]))]
        for each in (first, *forks):
            each.take([self.random.randrange(5)])
            self.answer_of[each.sequence] = each

    def _step(self, sequence: Sequence, draft: list[int]) -> None:
        """Some of the guesses come, then a token that mostly goes on as the answer's own do."""
        answer, ids = self.answer_of[sequence], sequence.token_ids
        came = draft[: self.random.randrange(len(draft) + 1)]
        again = ids[-7] if len(ids) > 7 and self.random.random() < 0.8 else self.random.randrange(5)
        answer.take([*came, again])
        if answer.room < 1 or self.random.random() < 0.02:
            del self.answer_of[sequence]
            self.speculation.forget(sequence)


@given(st.integers(0, 1 << 30))
def test_proposals_are_those_of_a_search_without_an_index(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penjing.serve.speculate.lookup.Places", Searched)
        patch.setattr("penjing.serve.speculate.told.Places", Searched)
        expected = Service(seed).run(60)
    assert Service(seed).run(60) == expected
    assert len(expected) == 60


def test_something_is_proposed_there() -> None:
    assert sum(len(draft) for seed in range(5) for drafts in Service(seed).run(60) for draft in drafts) > 100


def test_an_answer_for_which_nothing_pays_is_asked_less_often_and_hits_are_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def draft(self: LookupDrafter, most: int) -> Draft:
        asked.append(len(answer.sequence.token_ids))
        return plain(self, most)

    plain = LookupDrafter.draft
    monkeypatch.setattr(LookupDrafter, "draft", draft)
    answer, speculation = Answering([1000, 1001], True), Speculation(COSTS)

    def step(token_id: int) -> int:
        """How many tokens are proposed behind it."""
        answer.take([token_id])
        drafts = speculation.propose([answer.sequence], {answer.sequence: cast(Any, answer)})
        return sum(map(len, drafts.values()))

    assert [step(token_id) for token_id in range(40)] == [0] * 40  # no token comes back
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (1, MOST_PAUSE + 1)
    assert all([step(token_id) for token_id in range(20)][MOST_PAUSE:])  # it repeats itself


def test_what_came_during_a_pause_counts_for_the_guess_before_it() -> None:
    speculation, answer = Speculation(StepCosts({1: 1.0, 64: 64.0})), Answering([*range(8)] * 2, True)
    for step in range(50):
        answer.take([step % 8])
        assert not speculation.propose([answer.sequence], {answer.sequence: cast(Any, answer)}), "no guess pays"
    shares = speculation._shares[True, False]
    assert shares.trials[LONGEST_MATCH] > 20
    assert shares.hits[LONGEST_MATCH] > 0.98 * shares.trials[LONGEST_MATCH]
