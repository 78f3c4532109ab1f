"""Pairs of answers as batches: each pair is two rows, the better answer first, and what a reference says of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penjing.train.chat.tokens import Pair
from penjing.train.data.stream import Draw
from penjing.train.objective.objective import Batch


def pair_batch(
    pairs: Sequence[Pair],
    pad: int,
    real: Tensor | None = None,
    length: int | None = None,
    reference: Tensor | None = None,
) -> Batch:
    """A batch of B pairs; row 2i is the chosen answer of pair i, row 2i + 1 the rejected one.

    Args:
        pad: fills rows up at their end, to `length` or to the longest of them.
        real: (B,) bool, which pairs count; all when None.
        reference: (B, 2) float32, log-probabilities of both answers.

    Returns:
        "tokens" (2B, T) int64; "rows" (R,) int64, the places in the flattened tokens whose next token is part of an
        answer, and "next" (R,) int64, that token; "answer" (R,) int64, the row of each; "last" (2B,) int64, the place
        in the flattened tokens where each row ends; "margin" (B,) float32; "real" (B,) bool; and "reference".
    """
    rows = [np.concatenate((pair.prompt, answer)) for pair in pairs for answer in (pair.chosen, pair.rejected)]
    begins = [len(pair.prompt) for pair in pairs for _ in range(2)]
    width = max(len(row) for row in rows) if length is None else length
    tokens = np.full((len(rows), width), pad, np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
    where = [np.arange(begin - 1, len(row) - 1) for begin, row in zip(begins, rows, strict=True)]
    owner = np.concatenate([np.full(len(some), place) for place, some in enumerate(where)])
    places = np.concatenate(where)
    values = {
        "tokens": tokens,
        "rows": owner * width + places,
        "next": tokens[owner, places + 1],
        "answer": owner,
        "last": np.array([place * width + len(row) - 1 for place, row in enumerate(rows)]),
        "margin": np.array([pair.margin for pair in pairs], np.float32),
    }
    batch = {name: torch.from_numpy(each) for name, each in values.items()}
    batch["real"] = torch.ones(len(pairs), dtype=torch.bool) if real is None else real
    if reference is not None:
        batch["reference"] = reference
    return batch


@dataclass(frozen=True)
class Pairs:
    """Pairs as `Indexed`; see `pair_batch`.

    Attributes:
        reference: (N, 2) float32, what it says of both answers of each pair; None without one.
        pad: fills rows up.
    """

    pairs: Sequence[Pair]
    reference: Tensor | None
    pad: int

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, draw: Draw) -> Batch:
        """See `Indexed`."""
        some = [self.pairs[place] for place in draw.samples.tolist()]
        known = None if self.reference is None else self.reference[torch.from_numpy(draw.samples)]
        return pair_batch(some, self.pad, torch.from_numpy(draw.real.copy()), reference=known)
