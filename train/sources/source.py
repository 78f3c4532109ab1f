"""What every kind of source gives: samples by number, their classes, and which of them are held out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.progress import plural

Values = bytes | str | Mapping[str, NDArray]
"""An encoded image, a text, or the arrays of one sample by the name of their input ("" where it has none)."""
Label = str | int
_HEAD = 1 << 16
_TEST = ("test", "val", "valid", "validation", "dev")


@dataclass(frozen=True)
class Source:
    """Samples by number.

    Attributes:
        where: what messages call it.
        size: how many.
        load: of one sample; InputError if it cannot be read.
        said: what messages call one sample.
        digest: a number from 0 to 2⁶⁴ - 1 that equal samples share.
        labels: the class of each; None: it has none.
        test: (size,) bool, which samples the source itself keeps for testing; None: it says nothing.
    """

    where: str
    size: int
    load: Callable[[int], Values]
    said: Callable[[int], str]
    digest: Callable[[int], int]
    labels: Sequence[Label] | None = None
    test: NDArray[np.bool_] | None = None

    def halves(self, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The samples to learn from, and those held out: the source's own choice, or about `share` of all by content.

        Raises:
            InputError: too few for both.
        """
        every = np.arange(self.size)
        if self.test is not None:
            return every[~self.test], every[self.test]
        if not share:
            return every, every[:0]
        places = np.array([self.digest(index) for index in range(self.size)], np.float64) / 2.0**64
        held = places < share
        if held.all() or not held.any():  # of a few samples, the nearest one to the bound changes sides
            held[places.argmax() if held.all() else places.argmin()] ^= True
        if held.all() or not held.any() or (places == places[0]).all():
            different = plural(len(np.unique(places)), "different sample")
            raise InputError(f"{self.where} holds {different}, too few to hold any out; give more")
        return every[~held], every[held]

    def judged(self, share: float) -> NDArray[np.int64]:
        """The samples to evaluate on: those that `halves` holds out, or all where it holds out none.

        Raises:
            InputError: too few.
        """
        learnt, held = self.halves(share)
        return held if share or self.test is not None else learnt


def is_test(name: str) -> bool | None:
    """Whether a folder's or file's name says that it is for testing (True) or training (False); None: neither."""
    word = name.lower().split("-")[0].split("_")[0].split(".")[0]
    return True if word in _TEST else False if word in ("train", "training") else None


def split_of(names: Sequence[str]) -> NDArray[np.bool_] | None:
    """Which of the files are for testing, where the parts of their paths (see `is_test`) tell both kinds apart."""
    said = [[kind for part in name.split("/") if (kind := is_test(part)) is not None] for name in names]
    kinds = [kinds[0] if kinds else None for kinds in said]
    if True in kinds and False in kinds:
        return np.array([kind is True for kind in kinds])
    return None


def content_digest(data: bytes, size: int | None = None) -> int:
    """`Source.digest` of a file's beginning and size, or of all its bytes."""
    return int.from_bytes(
        hashlib.blake2b(data[:_HEAD] + (size or len(data)).to_bytes(8, "little"), digest_size=8).digest(), "little"
    )


def join(sources: Sequence[Source], where: str, names: Sequence[str]) -> Source:
    """Several as one, in order; `names` (of their files) may say which are for testing.

    Raises:
        InputError: some have classes and some have none.
    """
    if len(sources) == 1:
        return sources[0]
    ends = np.cumsum([each.size for each in sources])
    labelled = [each.labels is not None for each in sources]
    if any(labelled) != all(labelled):
        raise InputError(
            f"{where}: {sources[labelled.index(False)].where} has no classes, others have; make them alike, or set "
            "data.labels = false"
        )
    labels = [label for each in sources for label in each.labels or ()] if all(labelled) else None
    test = split_of(names)

    def at(index: int) -> tuple[Source, int]:
        place = int(np.searchsorted(ends, index, side="right"))
        return sources[place], int(index - (ends[place - 1] if place else 0))

    def load(index: int) -> Values:
        source, inside = at(index)
        return source.load(inside)

    def said(index: int) -> str:
        source, inside = at(index)
        return source.said(inside)

    def digest(index: int) -> int:
        source, inside = at(index)
        return source.digest(inside)

    sizes = [each.size for each in sources]
    return Source(where, int(ends[-1]), load, said, digest, labels, None if test is None else np.repeat(test, sizes))
