"""Guesses for the running answers, step by step: made, weighed against what rows cost, and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from penjing.serve.engine.answer import Answer
from penjing.serve.engine.sequence import Sequence
from penjing.serve.speculate.acceptance import LEAST_CHANCE, Acceptance, Shares
from penjing.serve.speculate.drafter import FIRST_CONFIDENCE, NO_DRAFT, Draft, Drafter, Silent
from penjing.serve.speculate.forced import ForcedDrafter
from penjing.serve.speculate.lookup import LookupDrafter
from penjing.serve.speculate.rows import StepCosts, share_rows
from penjing.serve.speculate.told import Telling, Told
from penjing.serve.speculate.worth import Worth, saved_seconds

if TYPE_CHECKING:
    from torch import Tensor

MOST_GUESSES = 16  # of one answer in a step
MOST_OF_NETWORK = 6  # it was trained to guess some tokens ahead
IDLE_STEPS = 3  # without a guess that pays, after which an answer is asked for guesses in a step less each time
MOST_PAUSE = 4  # steps
AGAIN = 0.5  # of guesses that follow a right one are right, by the network of SmolLM2
SURE = 1.0  # tokens that an answer's own words promise, above which the network is not asked

DRAFTERS: dict[str, Callable[[list[int]], Drafter]] = {"lookup": LookupDrafter, "forced": lambda _: Silent()}


class Network(Protocol):
    """A network that guesses for several answers; see `penjing.serve.speculate.network`."""

    costs: StepCosts
    """Seconds of one guess for each of so many answers."""

    def guess(self, hidden: list[Tensor], last_ids: list[int], most: int, least: float) -> list[Draft]: ...


class Speculation:
    """Belongs to one engine.

    Args:
        costs: of steps on this machine.
        network: guesses too, for answers that are free; what an answer's own tokens or form tell goes before where it
            is likelier.
        lookup: guess by an answer's own tokens and by other answers; else only what forms force.
    """

    def __init__(self, costs: StepCosts, network: Network | None = None, *, lookup: bool = True) -> None:
        self.costs = costs
        self._lookup, self._told = lookup, Told()
        self._network, self._worth = network, Worth()
        self._hidden: dict[Sequence, Tensor] = {}
        # Greedy answers repeat themselves more than sampled ones, and a form asks for other tokens.
        self._shares = {(greedy, held): Shares() for greedy in (True, False) for held in (True, False)}
        self._guessing: dict[Sequence, _Guessing] = {}

    def propose(self, running: Iterable[Sequence], answer_of: Mapping[Sequence, Answer]) -> dict[Sequence, list[int]]:
        """Tokens to check behind the last one of those of `running` that have begun and lack their next token alone."""
        writing = [
            answer_of[sequence]
            for sequence in running
            if sequence.num_output_tokens and sequence.num_computed_tokens + 1 == len(sequence.token_ids)
        ]
        answers = writing if self._lookup else [answer for answer in writing if answer.constraint is not None]
        if not answers:
            return {}
        least = max(self.costs.least_chance(len(writing)), LEAST_CHANCE)
        guessing = [self._guessing.get(answer.sequence) or self._begin(answer) for answer in answers]
        chances = [each.guess(answer.room - 1, least) for each, answer in zip(guessing, answers, strict=True)]
        offered, seconds = self._ask_network(answers, chances, len(writing)) if self._network else ({}, 0.0)
        if offered:
            for number, (answer, each) in enumerate(zip(answers, guessing, strict=True)):
                if answer.sequence in offered:
                    chances[number] = each.weigh(offered[answer.sequence], chances[number], answer.room - 1, least)
        elif not any(chances):
            return {}
        counts = share_rows(chances, len(writing), self.costs)
        if offered:
            taken = [
                chance
                for each, row, count in zip(guessing, chances, counts, strict=True)
                if each.draft.kinds and each.draft.kinds[0] >= FIRST_CONFIDENCE
                for chance in row[:count]
            ]
            self._worth.note(saved_seconds(taken, len(writing), self.costs), seconds)
        return {
            answer.sequence: each.draft.token_ids[:count]
            for answer, each, count in zip(answers, guessing, counts, strict=True)
            if count
        }

    def saw(self, sequence: Sequence, hidden_RE: Tensor | None, row: int) -> None:
        """The token that `sequence` gets now was chosen from this row of what the model's head was given."""
        if self._network is not None and hidden_RE is not None:
            self._hidden[sequence] = hidden_RE[row].clone()

    def forget(self, sequence: Sequence) -> None:
        """Its answer has ended."""
        if guessing := self._guessing.pop(sequence, None):
            guessing.end()
        self._hidden.pop(sequence, None)

    def forget_told(self) -> None:
        """Guess by no answer that has ended, nor by what became of guesses of its tokens."""
        self._told.clear()
        for shares in self._shares.values():
            shares.forget_tokens()

    def _ask_network(
        self, answers: list[Answer], chances: list[list[float]], num_rows: int
    ) -> tuple[dict[Sequence, Draft], float]:
        """What the network guesses for those of `answers` that are free and unsure, in a step of `num_rows` without
        guesses, and the seconds that this is known to take; nothing while it has not paid lately."""
        free = [
            answer.sequence
            for answer, row in zip(answers, chances, strict=True)
            if answer.constraint is None and sum(row) < SURE and answer.sequence in self._hidden
        ]
        network = self._network
        if network is None or not free or not self._worth.ask():
            return {}, 0.0
        once, alone = network.costs.of(len(free)), self.costs.of(num_rows)
        rows = self.costs.of(num_rows + len(free)) - alone
        # A further guess for all comes true with about half of their chance so far, and then saves its share of a step.
        least = (once + rows) / (AGAIN * alone * len(free) / num_rows)
        hidden, last = [self._hidden[each] for each in free], [each.token_ids[-1] for each in free]
        drafts = network.guess(hidden, last, MOST_OF_NETWORK if self._worth.pays else 1, least)
        return dict(zip(free, drafts, strict=True)), once * len(drafts[0].token_ids)

    def _begin(self, answer: Answer) -> _Guessing:
        drafter = DRAFTERS["lookup" if self._lookup else "forced"](answer.sequence.token_ids)
        token_ids, telling = answer.sequence.token_ids, None
        if answer.constraint is not None:
            drafter = ForcedDrafter(token_ids, answer.constraint, drafter)
        elif self._lookup:
            telling = Telling(self._told, token_ids, answer.sequence.num_prompt_tokens)
        made = self._guessing[answer.sequence] = _Guessing(
            token_ids, drafter, telling, Acceptance(self._shares[answer.greedy, answer.constraint is not None])
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
    """One answer's drafters, how often they were right, and what was guessed last."""

    def __init__(self, token_ids: list[int], drafter: Drafter, telling: Telling | None, acceptance: Acceptance) -> None:
        self._token_ids, self._telling, self._acceptance = token_ids, telling, acceptance
        self._drafters = [drafter] if telling is None else [drafter, telling]
        self._made: list[tuple[int, Draft]] = []  # and the place of its first token
        self._num_idle = self._pause = 0
        self.draft: Draft = NO_DRAFT

    def guess(self, room: int, least: float) -> list[float]:
        """Learn from the last guesses, make new ones, and say how likely the first tokens of the best are to come, as
        far as that is not below `least`. An answer for which nothing was is asked less often.

        Args:
            room: guesses at most; there are MOST_GUESSES at most, too.
        """
        self.draft = NO_DRAFT
        if self._pause:
            self._pause -= 1
            return []
        token_ids, acceptance, most = self._token_ids, self._acceptance, min(room, MOST_GUESSES)
        for begin, draft in self._made:
            acceptance.observe(token_ids[begin - 1], draft, token_ids[begin : begin + MOST_GUESSES])
        self._made = []
        best, promised = list[float](), 0.0
        for drafter in self._drafters:
            draft = drafter.draft(most)
            if not draft.token_ids:
                continue
            self._made.append((len(token_ids), draft))
            chances = acceptance.chances(token_ids[-1], draft, least)
            if chances and (tokens := sum(chances)) > promised:
                best, promised, self.draft = chances, tokens, draft
        self._num_idle = 0 if best or self._telling is None else self._num_idle + 1
        self._pause = min(self._num_idle // IDLE_STEPS, MOST_PAUSE)
        return best

    def end(self) -> None:
        """The answer has ended, and others may guess by it."""
        if self._telling is not None:
            self._telling.tell()

    def weigh(self, offered: Draft, chances: list[float], room: int, least: float) -> list[float]:
        """Take the guess that is `offered` in place of its own if that promises more tokens; the chances of the one
        that was taken."""
        other = Draft(offered.token_ids[:room], offered.kinds[:room])
        promised = self._acceptance.chances(self._token_ids[-1], other, least)
        if sum(promised) <= sum(chances):
            return chances
        self.draft = other
        self._made.append((len(self._token_ids), other))
        return promised
