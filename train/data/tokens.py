"""Sequences of one length out of token shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penjing.core.errors import ConfigError
from penjing.train.data.shards import ShardIndex, TokenShards
from penjing.train.data.stream import TokenSamples
from penjing.train.objective.objective import IGNORED, Batch


class TokenRows(TokenSamples):
    """Sample i is the shards' tokens i·S … i·S + S, so that every token but the first is a target once an epoch. S is
    T, less what begins a text, which each row begins with and which is no target.

    With `document_mask`, batches have "documents" (B, T) int64 too: how many documents ended in the row before each
    token.

    Raises:
        ConfigError: see `text_of_row`.
    """

    def __init__(self, shards: TokenShards, length: int, document_mask: bool = False) -> None:
        self._shards, self._document_mask = shards, document_mask
        self.stride = text_of_row(shards.index, length)

    def __len__(self) -> int:
        return (self._shards.num_tokens - 1) // self.stride

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """See `TokenSamples`; targets are the tokens one place on."""
        stride, begin = self.stride, self._shards.index.begin_of_text
        rows = torch.from_numpy(np.stack([self._shards.read(int(sample) * stride, stride + 1) for sample in samples]))
        before = torch.tensor(begin, dtype=torch.int64).expand(len(rows), -1)
        tokens = torch.cat([before, rows[:, :-1]], 1)
        targets = torch.cat([torch.full_like(before, IGNORED), rows[:, 1:]], 1)
        batch = {"tokens": tokens, "targets": targets}
        if self._document_mask:
            batch["documents"] = documents_of(batch["tokens"], self._shards.index.end_of_text)
        return batch


def text_of_row(index: ShardIndex, length: int) -> int:
    """Tokens of text in a row of `length` tokens.

    Raises:
        ConfigError: what begins a text fills it.
    """
    if (room := length - len(index.begin_of_text)) < 1:
        raise ConfigError(f"data.sequence_length={length} has no room behind what begins a text; raise it")
    return room


def held_out_rows(shards: TokenShards, length: int, document_mask: bool = False) -> TokenRows:
    """`TokenRows` to evaluate on.

    Raises:
        ConfigError: there is none.
    """
    if not len(rows := TokenRows(shards, length, document_mask)):
        raise ConfigError(
            f"split {shards.split!r} of {shards.folder} has {shards.num_tokens} tokens, less than one sequence of "
            f"{length} + 1; lower data.sequence_length or raise data.held_out"
        )
    return rows


def documents_of(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """(B, T) int64: how many documents ended in the row before each token."""
    return F.pad((tokens_BT == end_of_text).cumsum(1)[:, :-1], (1, 0))
