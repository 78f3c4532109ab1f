"""Conversations packed into rows of one length, each by itself: attention and positions do not pass its ends."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.train.chat.tokens import Masked
from penjing.train.data.stream import TokenSamples
from penjing.train.objective.objective import IGNORED, Batch


@dataclass(frozen=True)
class PackedRows(TokenSamples):
    """Texts, and for each row of `length` tokens the texts in it.

    Attributes: pad: the token that fills a row up.
    """

    texts: Sequence[Masked]
    rows: Sequence[tuple[int, ...]]
    length: int
    pad: int

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """{"tokens", "targets", "documents"}, each (B, length) int64; what fills up is a document of its own."""
        tokens = np.full((len(samples), self.length), self.pad, np.int64)
        targets = np.full((len(samples), self.length), IGNORED, np.int64)
        documents = np.zeros((len(samples), self.length), np.int64)
        for place, row in enumerate(samples):
            at = 0
            for number, text in enumerate(self.texts[each] for each in self.rows[row]):
                end = at + len(text.ids)
                tokens[place, at:end] = text.ids
                targets[place, at : end - 1] = np.where(text.learnt[1:], text.ids[1:], IGNORED)
                documents[place, at:end] = number
                at = end
            documents[place, at:] = len(self.rows[row])
        named = {"tokens": tokens, "targets": targets, "documents": documents}
        return {name: torch.from_numpy(values) for name, values in named.items()}


def pack_rows(texts: Sequence[Masked], length: int, pad: int, *, together: bool = True) -> PackedRows:
    """Put texts of at most `length` tokens into rows: the longest first, each into the fullest row that has room
    (best fit decreasing), in an order that follows from the texts alone; not `together`, a row has one."""
    if not together:
        return PackedRows(texts, [(place,) for place in range(len(texts))], length, pad)
    order = sorted(range(len(texts)), key=lambda place: (-len(texts[place].ids), place))
    rooms: list[tuple[int, int]] = []  # (tokens left, row), sorted
    rows: list[list[int]] = []
    for place in order:
        size = len(texts[place].ids)
        found = bisect.bisect_left(rooms, (size, -1))
        room, row = rooms.pop(found) if found < len(rooms) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(place)
        if room > size:
            bisect.insort(rooms, (room - size, row))
    return PackedRows(texts, [tuple(row) for row in rows], length, pad)
