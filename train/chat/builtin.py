"""Conversations that need no file: sums in words, with a right and a wrong answer each, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from penjing.core.errors import InputError
from penjing.train.chat.questions import questions
from penjing.train.data.corpora import name_place

BUILTIN = ("builtin:sums", "builtin:sums-compared", "builtin:large-sums", "builtin:questions")
SUMS = 512  # of all there are: a pass takes minutes on two cores
_LARGEST = 40
_NUMBERS = {"builtin:large-sums": range(100, 500, 3)}  # others take those from 1 to the largest
_ASKED = ("What is {a} + {b}?", "Add {a} and {b}.", "How much are {a} and {b} together?")
COMPARED = 4  # wrong answers to each sum
_OFF = (-10, -2, -1, 1, 2, 10)  # a wrong answer is as long as the right one, or nearly


def builtin_rows(source: str, named: str = "data.sources") -> Iterator[dict[str, Any]]:
    """The rows of `source`, conversations, pairs and prompts in one: each has "messages", "prompt", "chosen",
    "rejected" and "answer".

    Args:
        source: "builtin:sums": "What is 17 + 25?" and "17 + 25 = 42", which is chosen, or "17 + 25 = 41", rejected;
            the answer is "42". "builtin:sums-compared": each of these four times, every time with the answer of another
            sum as the wrong one, which is more easily told from the right one. "builtin:large-sums": like the first, of
            two numbers of three digits. "builtin:questions": see `penjing.train.chat.questions`; only "prompt".
        named: the setting that names it, for messages.

    Raises:
        InputError: there is no such source.
    """
    if source == "builtin:questions":
        yield from questions()
        return
    if source not in BUILTIN:
        raise InputError(f"{named}: {source!r} is unknown; choose {', '.join(BUILTIN)}, a file or a folder")
    numbers = _NUMBERS.get(source, range(1, _LARGEST + 1))
    chosen = sorted(product(numbers, numbers), key=lambda each: name_place(f"order {each}"))[:SUMS]
    for a, b in chosen:
        question = _ASKED[int(name_place(f"question {a, b}") * len(_ASKED))].format(a=a, b=b)
        prompt = [{"role": "user", "content": question}]
        for wrong in _of_others(a, b) if source == "builtin:sums-compared" else _near(a, b):
            right, other = ([{"role": "assistant", "content": f"{a} + {b} = {said}"}] for said in (a + b, wrong))
            pair = {"prompt": prompt, "chosen": right, "rejected": other}
            yield {"messages": [*prompt, *right], **pair, "answer": str(a + b)}


def _near(a: int, b: int) -> list[int]:
    """A wrong answer near the right one."""
    off = [each for each in _OFF if a + b + each > 0]
    return [a + b + off[int(name_place(f"answer {a, b}") * len(off))]]


def _of_others(a: int, b: int) -> list[int]:
    """Answers of other sums, in an order that looks drawn."""
    others = [each for each in range(2, 2 * _LARGEST + 1) if each != a + b]
    return sorted(others, key=lambda each: name_place(f"wrong {a, b, each}"))[:COMPARED]
