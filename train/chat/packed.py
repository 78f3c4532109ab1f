"""Conversations packed into rows of one length, each by itself: attention and positions do not pass its ends."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penjing.train.chat.tokens import Masked
from penjing.train.data.order import Order
from penjing.train.objective.objective import IGNORED, Batch


@dataclass(frozen=True)
class PackedRows:
    """Texts, and for each row of `length` tokens the texts in it.

    Attributes: pad: the token that fills a row up.
    """

    texts: Sequence[Masked]
    rows: Sequence[tuple[int, ...]]
    length: int
    pad: int

    def batch(self, rows: Sequence[int]) -> Batch:
        """{"tokens", "targets", "documents"}, each (B, length) int64; what fills up is a document of its own."""
        tokens = np.full((len(rows), self.length), self.pad, np.int64)
        targets = np.full((len(rows), self.length), IGNORED, np.int64)
        documents = np.zeros((len(rows), self.length), np.int64)
        for place, row in enumerate(rows):
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


class RowStream:
    """Endless micro-batches of packed rows, shuffled anew every epoch; see `PackedRows.batch`."""

    def __init__(
        self, rows: PackedRows, *, batch_size: int, micro_batch: int, rank: int, world_size: int, seed: int
    ) -> None:
        self._rows = rows
        self.order = Order(len(rows.rows), batch_size, micro_batch, rank, world_size, seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        _, samples = self.order.next()
        batch = self._rows.batch(samples.tolist())
        batch["targets"][torch.from_numpy(~self.order.real)] = IGNORED
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position; see `Order`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see `Order`."""
        self.order.load_state_dict(state)


def shares(total: int, micro_batch: int, rank: int, world_size: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """One pass over `total` samples: the samples of each micro-batch of this process, at least one micro-batch, the
    last filled up with sample 0, and (micro_batch,) bool, which of them count."""
    per_round = micro_batch * world_size
    for begin in range(rank * micro_batch, -(-total // per_round) * per_round, per_round):
        places = np.arange(begin, begin + micro_batch)
        real = places < total
        yield np.where(real, places, 0).tolist(), torch.from_numpy(real)
