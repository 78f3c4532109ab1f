"""Who chooses an answer's next token: the C++ kernels for all rows of a step at once, or numpy where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penjing.core.errors import PenjingError, RequestError, ServerError
from penjing.kernels.cpu.library import SampleRow
from penjing.kernels.cpu.sampling import sample_rows
from penjing.kernels.dispatch import cpu_extension
from penjing.serve.sampling.constraint import Constraint, allowed
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sampling.sampler import (
    GREEDY_BELOW,
    LARGEST,
    SMALLEST,
    TokenCounts,
    sample,
    top_logprobs,
    uniform,
)

if TYPE_CHECKING:
    from torch import Tensor

Scores = list[tuple[int, float, int]]
"""`(token id, natural log of the probability, rank)` for some tokens."""
NOT_FINITE, NOT_HELD = -2, -3


class StepScores(NamedTuple):
    """What a step says about the next tokens of R sequences, valid until the next step: all logits, float32, or where
    those were not asked for the largest of each row (the first of equals; NaN if there is one) and its token."""

    logits_RV: np.ndarray | None  # noqa: N815
    values_R: np.ndarray | None = None  # noqa: N815
    ids_R: np.ndarray | None = None  # noqa: N815
    hidden_RE: Tensor | None = None  # noqa: N815
    """Where a draft network reads it: what the model's head was given."""


class Choice(NamedTuple):
    """A row's token and the scores that were asked for; or NOT_FINITE where the logits are not, or NOT_HELD where the
    form failed, and the error."""

    token: int
    scores: Scores | None = None
    error: PenjingError | None = None


def _not_finite() -> Choice:
    words = "the model's logits are not finite numbers for this input (an overflow or damaged weights)"
    return Choice(NOT_FINITE, error=ServerError(words))


class Chooser:
    """How one answer's tokens are chosen; counts those that it is told of.

    Most tokens that a model would choose fit the form that it was asked for, and to ask whether one does takes a
    fraction of what it takes to say which ones do. So a token is chosen freely, and only if it is refused again among
    those that are allowed, by another number. The largest logit stays the same, and so do the probabilities of a draw
    without filters: with A the sum of what is allowed, p + (1 − A) · p ÷ A = p ÷ A. Filters look at what is allowed
    alone, as other engines have it, so that with them the mask comes first.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        index: int,
        prompt_ids: list[int],
        stop_ids: Sequence[int],
        constraint: Constraint | None,
    ) -> None:
        self._params, self._seed, self._index, self._constraint = params, seed, index, constraint
        self._position = 0
        self._counts = TokenCounts(prompt_ids) if params.has_penalties else None
        self._stop_ids = np.array(sorted(stop_ids), dtype=np.int32)
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias, dtype=np.int32)
        self._bias = np.fromiter(bias.values(), dtype=np.float32)
        self._greedy = params.temperature < GREEDY_BELOW
        plain = not (params.has_penalties or bias or constraint) and params.logprobs is None
        self._largest_suffices = plain and self._greedy
        filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.asks_later = constraint is not None and (self._greedy or not filters)
        """Whether a token is chosen before the form is asked, so that no mask is needed until one is refused."""
        self._row: SampleRow | None = None

    def largest_suffices(self) -> bool:
        """Whether the largest logit alone decides about the next token."""
        return self._largest_suffices and not self._num_forbidden()

    def push(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self._position += 1
        if self._counts is not None:
            self._counts.add(token_id)

    def refuses(self, token_id: int) -> bool:
        """Whether the form does not allow what was chosen freely.

        Raises:
            RequestError: the form failed. Else its mask has been computed where it refuses.
        """
        if self._constraint is None or not self.asks_later or self._constraint.num_allowed([token_id]):
            return False
        self._constraint.fill()
        return True

    def row(self, again: bool) -> tuple[SampleRow, _Kept]:
        """What the kernels need for the next token, and the arrays behind it, which must outlive the call. `again`:
        what was chosen freely is refused."""
        params = self._params
        kept = _Kept(-1 if params.logprobs is None else params.logprobs)
        row = self._row or self._new_row()
        kept.attach(row)
        row.token = -1
        row.number = 0.0 if self._greedy else self._number(again)
        row.mask = None if (mask := self._mask(again)) is None else mask.ctypes.data
        row.num_forbidden = self._num_forbidden()
        if self._counts is not None:
            row.seen, row.counts, row.num_seen = self._counts.addresses()
        return row, kept

    def by_numpy(self, logits_V: np.ndarray, again: bool) -> Choice:
        """The next token by the reference."""
        if not np.isfinite(logits_V.max()):
            return _not_finite()
        num_forbidden, mask = self._num_forbidden(), self._mask(again)
        token = sample(
            logits_V,
            self._params,
            self._number(again),
            self._counts,
            self._stop_ids if num_forbidden else None,
            None if mask is None else allowed(mask, len(logits_V)),
        )
        count = self._params.logprobs
        return Choice(token, None if count is None else top_logprobs(logits_V, token, count))

    def _number(self, again: bool) -> float:
        """In [0, 1): where to draw."""
        return uniform(self._seed, self._index, -1 - self._position if again else self._position)

    def _mask(self, again: bool) -> np.ndarray | None:
        """The tokens that may be chosen; None for all."""
        return None if self._constraint is None or (self.asks_later and not again) else self._constraint.mask

    def _num_forbidden(self) -> int:
        return len(self._stop_ids) if self._position < self._params.min_tokens else 0

    def _new_row(self) -> SampleRow:
        params = self._params
        self._row = SampleRow(
            bias_ids=self._bias_ids.ctypes.data,
            bias=self._bias.ctypes.data,
            num_bias=len(self._bias),
            forbidden=self._stop_ids.ctypes.data,
            temperature=0.0 if self._greedy else min(params.temperature, LARGEST),
            top_k=min(max(params.top_k, 0), 2**31 - 1),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=min(max(params.repetition_penalty, SMALLEST), LARGEST),
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
        )
        return self._row


class _Kept:
    """Where a row's scores are written."""

    def __init__(self, num_logprobs: int) -> None:
        self._num_logprobs = num_logprobs
        size = num_logprobs + 1
        self._ids, self._ranks = np.empty(size, np.int32), np.empty(size, np.int64)
        self._logprobs = np.empty(size, np.float64)

    def attach(self, row: SampleRow) -> None:
        row.num_logprobs = self._num_logprobs
        if self._num_logprobs >= 0:
            row.top_ids, row.top_ranks = self._ids.ctypes.data, self._ranks.ctypes.data
            row.top_logprobs = self._logprobs.ctypes.data

    def choice(self, row: SampleRow) -> Choice:
        if row.token == NOT_FINITE:
            return _not_finite()
        if self._num_logprobs < 0:
            return Choice(row.token)
        columns = (array[: row.num_top].tolist() for array in (self._ids, self._logprobs, self._ranks))
        return Choice(row.token, list(zip(*columns, strict=True)))


class Wanted(NamedTuple):
    """What a row of logits is for: the next token of `chooser`, or the scores of `given` and of `num_others`."""

    chooser: Chooser
    given: int = -1
    num_others: int = 0


def choose_rows(wanted: Sequence[Wanted], scores: StepScores, numbers: Sequence[int] | None = None) -> list[Choice]:
    """A choice for each row of a step, or for those of `numbers`."""
    if not wanted:
        return []
    logits_RV = scores.logits_RV
    if logits_RV is None:
        assert scores.values_R is not None
        assert scores.ids_R is not None
        values, ids = scores.values_R, scores.ids_R
        if numbers is not None:
            values, ids = values[numbers], ids[numbers]
        finite = np.isfinite(values).tolist()
        return [Choice(token) if good else _not_finite() for token, good in zip(ids.tolist(), finite, strict=True)]
    numbers = range(len(logits_RV)) if numbers is None else numbers
    choices = _choose(wanted, logits_RV, numbers, again=False)
    refused: list[int] = []
    for place, each in enumerate(wanted):
        if each.given < 0 and choices[place].error is None:
            try:
                if each.chooser.refuses(choices[place].token):
                    refused.append(place)
            except RequestError as error:
                choices[place] = Choice(NOT_HELD, error=error)
    if refused:
        anew = _choose([wanted[i] for i in refused], logits_RV, [numbers[i] for i in refused], again=True)
        for place, choice in zip(refused, anew, strict=True):
            choices[place] = choice
    return choices


def _choose(wanted: Sequence[Wanted], logits_RV: np.ndarray, numbers: Sequence[int], again: bool) -> list[Choice]:
    extension = cpu_extension()
    if extension is None:
        return [_by_numpy(each, logits_RV[number], again) for each, number in zip(wanted, numbers, strict=True)]
    rows = [_row(each, again) for each in wanted]
    sample_rows(extension, [row for row, _ in rows], logits_RV, numbers)
    return [kept.choice(row) for row, kept in rows]


def _row(wanted: Wanted, again: bool) -> tuple[SampleRow, _Kept]:
    if wanted.given < 0:
        return wanted.chooser.row(again)
    row, kept = SampleRow(token=wanted.given), _Kept(wanted.num_others)
    kept.attach(row)
    return row, kept


def _by_numpy(wanted: Wanted, logits_V: np.ndarray, again: bool) -> Choice:
    if wanted.given < 0:
        return wanted.chooser.by_numpy(logits_V, again)
    if not np.isfinite(logits_V.max()):
        return _not_finite()
    return Choice(wanted.given, top_logprobs(logits_V, wanted.given, wanted.num_others))
