"""What the surface of a text tells beside its meaning: signs, lengths of words, repetition, and whether its words, and
pairs of them, stand in other texts too.

Noise lies on either side of what is usual: random signs cannot be compressed, and templates too well. So a number
counts by its distance from what clean texts have.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penjing.core.text.near_duplicates import word_grams

Hashes = NDArray[np.uint64]
_WORD = re.compile(r"\w+")
_READ = 20_000  # characters of a document whose words are learned
_MOST_AWAY = 5.0  # spreads: further is no more certain
_LEAST_KNOWN = 0.05  # share of known words under which pairs tell nothing


@dataclass(frozen=True)
class Usual:
    """What clean texts are like.

    Attributes:
        middle, spread: (10,) of the numbers of `_numbers`.
        words, pairs: sorted hashes of words, and of pairs of words next to each other; (n,) uint64.
        words_twice, pairs_twice: those that stand in two documents and more.
    """

    middle: NDArray[np.float64]
    spread: NDArray[np.float64]
    words: Hashes
    words_twice: Hashes
    pairs: Hashes
    pairs_twice: Hashes

    def features(self, text: str, num_tokens: int, own: str | None = None) -> NDArray[np.float64]:
        """(12,) features of `text`, which a tokenizer cuts into `num_tokens` pieces.

        Args:
            own: a document that this was learned from and `text` comes from: what stands in it alone counts as unknown.
        """
        away = np.abs(_numbers(text, num_tokens) - self.middle) / self.spread
        words = _known(word_grams(text, 1), self.words, self.words_twice, own, 1)
        pairs = _known(word_grams(text, 2), self.pairs, self.pairs_twice, own, 2)
        return np.append(np.minimum(away, _MOST_AWAY), [words, pairs / max(words, _LEAST_KNOWN)])

    def save(self, path: Path) -> None:
        """Write it."""
        np.savez(path, **vars(self))


def load_usual(path: Path) -> Usual:
    """What `Usual.save` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return Usual(**{name: arrays[name] for name in arrays.files})


def usual_of(pieces: list[tuple[str, int]], documents: list[str]) -> Usual:
    """What is usual in (text, number of its tokens) `pieces`, and the words of `documents`."""
    numbers = np.stack([_numbers(text, tokens) for text, tokens in pieces])
    spread = numbers.std(0)
    words, pairs = (_stand_in(word_grams(text[:_READ], size) for text in documents) for size in (1, 2))
    return Usual(np.median(numbers, 0), np.where(spread > 1e-6, spread, 1e-6), *words, *pairs)


def _stand_in(grams: Iterable[Hashes]) -> tuple[Hashes, Hashes]:
    """Hashes that stand in one document and more, and in two and more."""
    found, counts = np.unique(np.concatenate([np.unique(each) for each in grams]), return_counts=True)
    return found, found[counts > 1]


def _known(grams: Hashes, once: Hashes, twice: Hashes, own: str | None, size: int) -> float:
    """The share of `grams` that stand in documents beside `own`."""
    if not len(grams):
        return 0.0
    known = np.isin(grams, once)
    if own is not None:
        known &= ~np.isin(grams, word_grams(own[:_READ], size)) | np.isin(grams, twice)
    return float(known.mean())


def _numbers(text: str, num_tokens: int) -> NDArray[np.float64]:
    size = max(1, len(text))
    words = _WORD.findall(text.lower())
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    raw = text.encode("utf-8", "replace")
    lengths = [len(word) for word in words] or [0]
    return np.array(
        [
            num_tokens / size,  # torn and garbled words need more
            np.log(max(1, len(raw)) / len(zlib.compress(raw))),
            sum(map(str.isalpha, text)) / size,
            sum(map(str.isdigit, text)) / size,
            sum(map(str.isspace, text)) / size,
            sum(map(str.isupper, text)) / size,
            len(set(words)) / max(1, len(words)),
            len(set(lines)) / max(1, len(lines)),
            np.mean(lengths),
            np.std(lengths),
        ],
        np.float64,
    )
