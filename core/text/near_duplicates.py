"""Near duplicates among texts by MinHash (Broder, 1997): signatures, and clusters of texts that share a bucket.

Two texts whose sets of word 5-grams overlap by the share s (Jaccard) agree in a row of their signatures with
probability s, and share one of 14 buckets of 8 rows with probability 1 − (1 − s⁸)¹⁴: 0.20 at s = 0.6, 0.92 at 0.8,
0.999 at 0.9. Rows, buckets and hash functions are datatrove's; the arithmetic is over whole arrays, 20 times as fast.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BUCKETS, ROWS, WORDS = 14, 8, 5
_PRIME = np.uint64((1 << 61) - 1)
_AT_ONCE = 256  # shingles: 112 rows of them, twice, stay in a core's second cache (0.46 MB)
_KNOWN_WORDS = 1 << 20  # hashes that are remembered, about 150 MB
# Scripts that are written without spaces (Thai, Lao, kana, Chinese): each character counts as a word.
SPACELESS = r"\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[^\W{SPACELESS}]+|[{SPACELESS}]")
_ASCII_WORD = re.compile(r"\w+", re.ASCII)


class _WordHashes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        if len(self) >= _KNOWN_WORDS:
            self.clear()
        digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        self[word] = value = int.from_bytes(digest, "little")
        return value


_hashes = _WordHashes()


def split_words(text: str) -> list[str]:
    """The words of `text` in lower case, digits kept: letters and digits in a row, or one character of a script that
    is written without spaces."""
    lower = text.lower()
    return (_ASCII_WORD if lower.isascii() else _WORD).findall(lower)


def word_grams(text: str, size: int = WORDS) -> NDArray[np.uint64]:
    """(n,) hashes of the runs of `size` words of `text`, in their order; of all its words where it has fewer."""
    words = split_words(text)
    if not words:
        return np.empty(0, np.uint64)
    size = min(size, len(words))
    hashes = np.fromiter(map(_hashes.__getitem__, words), np.uint64, len(words))
    grams = np.zeros(len(words) - size + 1, np.uint64)
    for place in range(size):
        grams *= np.uint64(0x9E3779B97F4A7C15)
        grams += hashes[place : place + len(grams)]
    grams ^= grams >> np.uint64(31)
    grams *= np.uint64(0xBF58476D1CE4E5B9)
    return grams ^ (grams >> np.uint64(29))


class Signer:
    """Signatures of texts.

    Args:
        buckets, rows: a signature has `buckets` × `rows` hashes.
        seed: of the hash functions; signatures of one seed can be compared.
    """

    def __init__(self, buckets: int = BUCKETS, rows: int = ROWS, seed: int = 1) -> None:
        self.buckets, self.rows = buckets, rows
        count, generator = buckets * rows, np.random.RandomState(seed)
        # datatrove draws in this order; a column each, so that the rows of a signature are contiguous
        self._factor = generator.randint(1, int(_PRIME), dtype=np.uint64, size=(count, 1))
        self._offset = generator.randint(0, int(_PRIME), dtype=np.uint64, size=(count, 1))
        self._product = np.empty((count, _AT_ONCE), np.uint64)
        self._carry = np.empty((count, _AT_ONCE), np.uint64)

    def signature(self, text: str) -> NDArray[np.uint64]:
        """(buckets, rows): for each hash function, its smallest value over the text's word grams. A text without words
        has itself as its only gram."""
        grams = np.unique(word_grams(text))
        return self.minima(grams if len(grams) else np.array([_hashes[text.strip()]], np.uint64))

    def minima(self, grams: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """(buckets, rows): min over `grams` (n ≥ 1,) of (factor · gram + offset mod 2⁶⁴) mod 2⁶¹ − 1."""
        best = np.full(self.buckets * self.rows, np.iinfo(np.uint64).max, np.uint64)
        for begin in range(0, len(grams), _AT_ONCE):
            some = grams[begin : begin + _AT_ONCE]
            value, carry = self._product[:, : len(some)], self._carry[:, : len(some)]
            np.multiply(some, self._factor, out=value)
            value += self._offset
            # x mod 2⁶¹ − 1 without a division: the upper three bits count once more
            np.right_shift(value, np.uint64(61), out=carry)
            value &= _PRIME
            value += carry
            np.subtract(value, _PRIME, out=carry)  # wraps round to a larger number where there was less
            np.minimum(value, carry, out=value)
            np.minimum(best, value.min(axis=1), out=best)
        return best.reshape(self.buckets, self.rows)

    def keys(self, text: str) -> NDArray[np.uint64]:
        """(buckets,): a hash of each bucket of `signature(text)`."""
        key = np.zeros(self.buckets, np.uint64)
        for row in self.signature(text).T:
            key = (key ^ (key >> np.uint64(32)) ^ row) * np.uint64(0x9E3779B97F4A7C15)
        return key


def connected(columns: Iterable[NDArray[np.uint64]], size: int) -> NDArray[np.int64]:
    """(size,): for each document the first document of its cluster; itself where it is alone or the first.

    Args:
        columns: each (size,); documents with an equal key in a column belong together, and so do those that a chain of
            such pairs leads to.
    """
    label = np.arange(size, dtype=np.int64)
    for keys in columns:
        order = np.argsort(keys, kind="stable")
        same = keys[order[1:]] == keys[order[:-1]]
        left, right = order[:-1][same], order[1:][same]
        while ((one := label[left]) != (other := label[right])).any():
            np.minimum.at(label, np.maximum(one, other), np.minimum(one, other))
            while (label[label] != label).any():
                label = label[label]
    return label
