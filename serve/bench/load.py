"""What a load asks for, and when: requests at times that do not depend on how fast anything is answered."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penjing.core.text.corpus import heldout_text

Scenario = Literal["chat", "long-prompt", "shared-prefix", "burst"]
BURST = 8


@dataclass(frozen=True)
class Asked:
    """One request of a load: when it is sent, in seconds from the start, what it says, and how long its answer is."""

    at: float
    messages: tuple[tuple[str, str], ...]
    max_tokens: int

    def body(self, model: str) -> dict[str, object]:
        """Of `/v1/chat/completions`, for an answer of exactly this length."""
        messages = [{"role": role, "content": text} for role, text in self.messages]
        return {
            "model": model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def make_load(scenario: Scenario, rate: float, seconds: float, seed: int = 0) -> list[Asked]:
    """The requests of `seconds` seconds, `rate` a second on average, in the order of their times.

    Arrivals are a Poisson process. In a `burst` it is bursts of `BURST` requests that arrive so, each at one instant,
    with the same rate of requests. `chat`: 30 to 150 words, 32 to 128 new tokens. `long-prompt`: every fourth request
    brings 800 words and wants 16 tokens, beside the others, which are chats. `shared-prefix`: chats that begin with the
    same 500 words.
    """
    draw = random.Random(seed)
    words = heldout_text().split()
    size = BURST if scenario == "burst" else 1
    found = []
    for at in _arrivals(draw, rate / size, seconds):
        for _ in range(size):
            found.append(Asked(at, *_SCENARIOS[scenario](draw, words, len(found))))
    return found


def _arrivals(draw: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at = draw.expovariate(rate)
    while at < seconds:
        yield at
        at += draw.expovariate(rate)


def _words(draw: random.Random, words: list[str], count: int) -> str:
    """A stretch of the text; another one each time, so that no cache helps."""
    begin = draw.randrange(len(words) - count)
    return " ".join(words[begin : begin + count])


_Content = tuple[tuple[tuple[str, str], ...], int]


def _chat(draw: random.Random, words: list[str], index: int) -> _Content:
    return (("user", _words(draw, words, draw.randint(30, 150))),), draw.randint(32, 128)


def _long_prompt(draw: random.Random, words: list[str], index: int) -> _Content:
    return _chat(draw, words, index) if index % 4 else ((("user", _words(draw, words, 800)),), 16)


def _shared_prefix(draw: random.Random, words: list[str], index: int) -> _Content:
    messages, tokens = _chat(draw, words, index)
    return (("system", " ".join(words[:500])), *messages), tokens


_SCENARIOS: dict[Scenario, Callable[[random.Random, list[str], int], _Content]] = {
    "chat": _chat,
    "long-prompt": _long_prompt,
    "shared-prefix": _shared_prefix,
    "burst": _chat,
}
