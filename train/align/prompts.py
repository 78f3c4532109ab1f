"""Prompts with the rows that they come from, which say what a right answer is, and answers to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from penjing.core.progress import Progress
from penjing.core.text.records import said_text
from penjing.train.chat.rows import Row, RowError, TooLongError, take_rows
from penjing.train.chat.tokens import ChatTokens


@dataclass(frozen=True)
class Prompt:
    """Tokens that an answer is to follow, and the row that they were written from."""

    tokens: list[int]
    row: Row

    @property
    def text(self) -> str:
        """What is asked: the prompt, or the last message of it."""
        given = self.row.get("prompt", self.row.get("messages"))
        last = given if isinstance(given, str) else given[-1]["content"]  # type: ignore[index]  # was rendered
        return said_text(last)

    @property
    def key(self) -> bytes:
        """The same of equal prompts."""
        return np.array(self.tokens, np.int32).tobytes()


@dataclass
class Sampled:
    """An answer: its tokens, with the one that ends it if it `ended`, and the engine's log-probability of each by the
    raw logits."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


@dataclass(frozen=True)
class Answer:
    """A sampled answer, its text without the tokens that end it."""

    sampled: Sampled
    text: str


def read_prompts(
    sources: Sequence[str] | Iterator[tuple[str, Row]],
    writer: ChatTokens,
    room: int,
    most_damaged: float,
    wrong: Callable[[Row], str | None],
    progress: Progress,
) -> list[Prompt]:
    """The prompts of `sources` that have at most `room` tokens; others are counted and told.

    Args:
        sources: see `take_rows`.
        wrong: why a row's answers could not be rewarded, or None.

    Raises:
        InputError: see `take_rows`.
    """

    def take(row: Row) -> Prompt:
        given = row.get("prompt", row.get("messages"))
        if isinstance(given, list) and given and isinstance(given[-1], dict) and given[-1].get("role") == "assistant":
            row = row | {"prompt": given[:-1]}  # a conversation of which the last turn is to be found
        if reason := wrong(row):
            raise RowError(reason)
        prompt = Prompt(writer.prompt(row), row)
        if len(prompt.tokens) > room:
            raise TooLongError
        return prompt

    return take_rows(sources, take, most_damaged, progress, "prompts")[0]


def answer_seed(seed: int, *places: int) -> int:
    """63 well-mixed bits of the run's seed and the place of a prompt."""
    digest = hashlib.sha256(" ".join(map(str, (seed, *places))).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
