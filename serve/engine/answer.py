"""One sequence's answer: which token it takes, what text that makes, and when it ends."""

from __future__ import annotations

import numpy as np

from penjing.core.text.detokenizer import IncrementalDetokenizer
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.engine.request import FinishReason, Logprob, RequestOutput, SamplingParams
from penjing.serve.engine.sampler import (
    GREEDY_BELOW,
    TokenCounts,
    sample,
    sample_top_k,
    top_k_is_settled,
    top_logprobs,
)
from penjing.serve.engine.sequence import Sequence
from penjing.serve.engine.stop import StopStrings

MAX_TOP_K = 64  # up to it the largest logits alone are asked for
TIES = 8  # and so many more, since what ties with the last one is kept too
PROMPT_TAIL = 8  # prompt tokens that the detokenizer sees, for the space before the first word


class Answer:
    """The output side of a sequence; the scheduler does not know of it."""

    __slots__ = (
        "_counts",
        "_detokenizer",
        "_forbidden",
        "_greedy",
        "_max_output_tokens",
        "_num_largest",
        "_params",
        "_seed",
        "_stop_ids",
        "_stops",
        "_tokenizer",
        "arrival_time",
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
    ) -> None:
        self.sequence = sequence
        self.arrival_time = arrival_time
        self.last_token_time: float | None = None
        self._params = params
        self._seed = seed
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
        self._counts = TokenCounts(sequence.token_ids) if params.has_penalties else None
        self._forbidden = (
            np.array(sorted(self._stop_ids), dtype=np.int64) if params.min_tokens and self._stop_ids else None
        )
        plain = not (params.has_penalties or params.logit_bias)
        self._greedy = plain and params.temperature < GREEDY_BELOW
        self._num_largest = 1 if self._greedy else params.top_k + TIES if plain and 0 < params.top_k <= MAX_TOP_K else 0

    def num_largest(self) -> int:
        """How many of the largest logits suffice for the next token; 0: all are needed."""
        return 0 if self._params.logprobs is not None or self._forbidden_now() is not None else self._num_largest

    def is_settled(self, values_K: np.ndarray, ids_K: np.ndarray) -> bool:
        """Whether the largest logits, as many as were asked for, suffice indeed: a tie may go on beyond them."""
        return self._greedy or top_k_is_settled(values_K, ids_K, self._params.top_k)

    def choose(self, logits_V: np.ndarray | None, values_K: np.ndarray, ids_K: np.ndarray) -> int:
        """The next token, from the row of logits (V float32, None if not needed) and its largest (see `Scores`)."""
        position, forbidden = self.sequence.num_output_tokens, self._forbidden_now()
        if self._greedy and forbidden is None:
            return int(ids_K[0])
        if logits_V is None:
            return sample_top_k(values_K, ids_K, self._params, self._seed, self.sequence.index, position)
        return sample(logits_V, self._params, self._seed, self.sequence.index, position, self._counts, forbidden)

    def _forbidden_now(self) -> np.ndarray | None:
        return self._forbidden if self.sequence.num_output_tokens < self._params.min_tokens else None

    def push(self, token_id: int, logits_V: np.ndarray | None) -> RequestOutput:
        """Append `token_id` to the sequence; the output that shows it, with a `finish_reason` if it was the last."""
        sequence, params = self.sequence, self._params
        sequence.token_ids.append(token_id)
        num_output_tokens = sequence.num_output_tokens
        if self._counts is not None:
            self._counts.add(token_id)
        output = self._output()
        output.token_ids.append(token_id)
        if params.logprobs is not None:
            assert logits_V is not None, "asked for by num_largest"
            output.logprobs = [self._logprobs(logits_V, token_id, params.logprobs)]
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
        elif num_output_tokens >= self._max_output_tokens:
            output.text = text
            self._finish(output, "length", "")
        else:
            output.text = text
        return output

    def end(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last output of an answer that ends from outside (cancelled or failed)."""
        output = self._output()
        output.error = error
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

    def _logprobs(self, logits_V: np.ndarray, chosen: int, count: int) -> dict[int, Logprob]:
        return {
            token: Logprob(logprob, rank, self._tokenizer.decode([token], skip_special=False))
            for token, logprob, rank in top_logprobs(logits_V, chosen, count)
        }
