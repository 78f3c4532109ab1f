"""One sequence's answer: which token it takes, what text that makes, and when it ends."""

from __future__ import annotations

import time

from penjing.core.errors import PenjingError
from penjing.core.text.detokenizer import IncrementalDetokenizer
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.request import FinishReason, Logprob, RequestOutput, Stages
from penjing.serve.engine.sequence import Sequence
from penjing.serve.engine.stop import StopStrings
from penjing.serve.sampling.choice import Choice, Chooser, Wanted
from penjing.serve.sampling.constraint import Constraint
from penjing.serve.sampling.params import SamplingParams
from penjing.serve.sampling.sampler import GREEDY_BELOW

PROMPT_TAIL = 8  # prompt tokens that the detokenizer sees, for the space before the first word


class Answer:
    """The output side of a sequence; the scheduler does not know of it."""

    __slots__ = (
        "_chooser",
        "_constraint",
        "_detokenizer",
        "_max_output_tokens",
        "_params",
        "_prompt_logprobs",
        "_stop_ids",
        "_stops",
        "_tokenizer",
        "arrival_time",
        "begun_time",
        "first_token_time",
        "last_token_time",
        "sequence",
    )

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        seed: int,
        tokenizer: Tokenizer,
        max_model_len: int,
        arrival_time: float,
        constraint: Constraint | None = None,
    ) -> None:
        self.sequence = sequence
        self.arrival_time = arrival_time
        self.begun_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self._params = params
        self._constraint = constraint
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None and sequence.index == 0:
            self._prompt_logprobs = [None]
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special=params.skip_special_tokens,
            prompt_tail=tuple(sequence.token_ids[-PROMPT_TAIL:]),
        )
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        room = max_model_len - sequence.num_prompt_tokens
        self._max_output_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        self._chooser = Chooser(params, seed, sequence.index, sequence.token_ids, sorted(self._stop_ids), constraint)

    @property
    def constraint(self) -> Constraint | None:
        """What holds the answer to a form, if anything does."""
        return self._constraint

    def masked_by(self) -> Constraint | None:
        """What must compute its mask before the next token is chosen."""
        return None if self._chooser.asks_later else self._constraint

    @property
    def room(self) -> int:
        """Tokens that may still come, 1 at least while the answer goes on."""
        return self._max_output_tokens - self.sequence.num_output_tokens

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self._params.temperature < GREEDY_BELOW

    def took_token(self, now: float) -> None:
        """Note when a token came, in seconds of `time.monotonic`."""
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now

    def stages(self, now: float) -> Stages:
        """Where the time of an answer went that ends `now`."""
        begun = now if self.begun_time is None else self.begun_time
        first = now if self.first_token_time is None else self.first_token_time
        return Stages(begun - self.arrival_time, first - begun, now - first)

    def largest_suffices(self) -> bool:
        """Whether the largest logit alone decides about the next token."""
        return self._chooser.largest_suffices()

    def wanted(self) -> Wanted:
        """What a row of logits behind the sequence's last token is for."""
        return Wanted(self._chooser)

    def wanted_score(self, position: int) -> Wanted:
        """What the row of logits before the prompt's token at `position` is for."""
        assert self._params.prompt_logprobs is not None
        return Wanted(self._chooser, self.sequence.token_ids[position], self._params.prompt_logprobs)

    def push_score(self, choice: Choice) -> None:
        """Take the scores of the prompt's next token."""
        assert self._prompt_logprobs is not None
        self._prompt_logprobs.append(self._logprobs(choice))
        self.sequence.score_from += 1

    def push(self, choice: Choice) -> RequestOutput:
        """Append what was chosen to the sequence; the output that shows it, with a `finish_reason` if it was the last.

        Raises:
            RequestError: the answer cannot be held to its form.
        """
        sequence, params = self.sequence, self._params
        token_id = choice.token
        sequence.token_ids.append(token_id)
        num_output_tokens = sequence.num_output_tokens
        self._chooser.push(token_id)
        complete = self._constraint is not None and self._constraint.push(token_id)
        output = self._output()
        output.token_ids.append(token_id)
        output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        if choice.scores is not None:
            output.logprobs = [self._logprobs(choice)]
        if token_id in self._stop_ids and num_output_tokens >= params.min_tokens:
            # The text of a stop token is shown on demand, like that of a stop string.
            text = self._detokenizer.push(token_id) if params.include_stop_str_in_output else ""
            self._finish(output, "stop", text)
            return output
        text = self._detokenizer.push(token_id)
        met = False
        if num_output_tokens >= params.min_tokens:
            text, met = self._stops.push(text)
        if met:
            output.text, output.finish_reason = text, "stop"
        elif complete:
            output.text = text
            self._finish(output, "stop", "")
        elif num_output_tokens >= self._max_output_tokens:
            output.text = text
            self._finish(output, "length", "")
        else:
            output.text = text
        return output

    def end(self, reason: FinishReason, error: PenjingError | None = None) -> RequestOutput:
        """The last output of an answer that ends from outside (cancelled or failed)."""
        output = self._output()
        output.error = error
        output.stages = self.stages(time.monotonic())
        self._finish(output, reason, "")
        return output

    def _finish(self, output: RequestOutput, reason: FinishReason, text: str) -> None:
        """Add `text` and what detokenizer and stop strings still hold back."""
        shown, met = self._stops.push(text + self._detokenizer.flush())
        output.text += shown if met else shown + self._stops.flush()
        output.finish_reason = "stop" if met and reason == "length" else reason

    def _output(self) -> RequestOutput:
        sequence = self.sequence
        return RequestOutput(
            sequence.request_id,
            sequence.index,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def _logprobs(self, choice: Choice) -> dict[int, Logprob]:
        """By token id; that of the chosen token comes first, as vLLM has it."""
        rows = sorted(choice.scores or (), key=lambda row: row[0] != choice.token)
        return {
            token: Logprob(logprob, rank, self._tokenizer.decode([token], skip_special=False))
            for token, logprob, rank in rows
        }
