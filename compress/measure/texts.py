"""Paragraphs of Python's help topics: to calibrate a text encoder on, and others to evaluate it on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from penjing.core.errors import InputError
from penjing.core.text.corpus import TOPIC_GAP, calibration_text, heldout_text

T = TypeVar("T")
SHORTEST = 40  # characters: headings and stray lines are left out


@dataclass(frozen=True)
class Retrieval:
    """`queries[i]` is the first sentence of the paragraph `documents[i]`."""

    queries: list[str]
    documents: list[str]


def calibration_paragraphs(count: int) -> list[str]:
    """`count` paragraphs, evenly spread over the text.

    Raises:
        InputError: the text has fewer.
    """
    return _spread(_paragraphs(calibration_text()), count, "calibrate")


def retrieval_set(count: int) -> Retrieval:
    """`count` held-out paragraphs of two sentences or more.

    Raises:
        InputError: the text has fewer.
    """
    found = [(text.split(". ", 1), text) for text in _paragraphs(heldout_text()) if ". " in text]
    long = [(parts[0], text) for parts, text in found if min(map(len, parts)) >= SHORTEST // 2]
    chosen = _spread(long, count, "evaluate")
    return Retrieval([f"{first}." for first, _ in chosen], [text for _, text in chosen])


def _paragraphs(text: str) -> list[str]:
    lines = (" ".join(paragraph.split()) for paragraph in text.split(TOPIC_GAP))
    return list(dict.fromkeys(line for line in lines if len(line) >= SHORTEST))


def _spread(values: list[T], count: int, setting: str) -> list[T]:
    if count > len(values):
        raise InputError(f"texts.{setting}={count}: there are {len(values)} such paragraphs; ask for fewer")
    return [values[index * len(values) // count] for index in range(count)]
