"""What a caller asks of the engine and what it gets back: requests and streamed outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from penjing.core.errors import PenjingError
from penjing.serve.sampling.params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Request:
    """One generation request.

    `prompt` is text or token ids; `add_special` puts begin-of-text before a text where the model's tokenizer does so
    (off for rendered chat templates, which write it themselves). `images` are JPEG or PNG files; for each, in their
    order, a text has the model's image token once. Requests with other `key`s share the engine fairly, by
    tokens; a lower `priority` comes before a higher one. `arrival_time` is in seconds of `time.monotonic`.
    """

    request_id: str
    prompt: str | Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    add_special: bool = True
    key: str = ""
    priority: int = 0
    images: Sequence[bytes] = ()
    arrival_time: float = field(default_factory=time.monotonic)


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability under the raw logits (before penalties and temperature), its rank
    (1 is the most likely) and its text by itself."""

    logprob: float
    rank: int
    decoded_token: str


class Stages(NamedTuple):
    """Seconds of an answer in the engine: in the queue, from its first step to its first token, and from there to its
    end. An answer that is taken back and computed again goes on in the stage that it is in."""

    queue: float
    prefill: float
    decode: float


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one of a request's `n` sequences.

    `text` and `token_ids` are the new part only: joined over all outputs of an index they are the whole answer. Text
    that could still become a stop string or is an incomplete UTF-8 sequence is held back, so `text` may be empty while
    `token_ids` is not. `finish_reason` is set on the last output of an index and only there; with "error", `error` says
    why: a RequestError where the request is at fault. `num_output_tokens` counts all tokens of the index so far,
    `num_cached_tokens` the prompt tokens that the prefix cache supplied. `logprobs` holds a dictionary by token id for
    each of `token_ids` (the chosen token first), when asked for. `prompt_logprobs`, on the first output of the first
    index when asked for, holds None for the prompt's first token and such a dictionary for each further one. `stages`
    is set on the last output.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    error: PenjingError | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    stages: Stages | None = None
