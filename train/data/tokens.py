"""Sequences of one length out of token shards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from penjing.core.errors import ConfigError
from penjing.train.data.shards import TokenShards
from penjing.train.data.stream import TokenSamples
from penjing.train.objective.objective import Batch


class TokenRows(TokenSamples):
    """Sample i is the shards' tokens i·T … i·T + T, so that every token but the first is a target once an epoch.

    With `document_mask`, batches have "documents" (B, T) int64 too: how many documents ended in the row before each
    token.
    """

    def __init__(self, shards: TokenShards, length: int, document_mask: bool = False) -> None:
        self._shards, self._length, self._document_mask = shards, length, document_mask

    def __len__(self) -> int:
        return (self._shards.num_tokens - 1) // self._length

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """See `TokenSamples`; targets are the tokens one place on."""
        length = self._length
        rows = torch.from_numpy(np.stack([self._shards.read(int(sample) * length, length + 1) for sample in samples]))
        batch = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
        if self._document_mask:
            batch["documents"] = documents_of(batch["tokens"], self._shards.index.end_of_text)
        return batch


def held_out_rows(shards: TokenShards, length: int, document_mask: bool = False) -> TokenRows:
    """`TokenRows` to evaluate on.

    Raises:
        ConfigError: there is none.
    """
    if shards.num_tokens <= length:
        raise ConfigError(
            f"split {shards.split!r} of {shards.folder} has {shards.num_tokens} tokens, less than one sequence of "
            f"{length} + 1; lower data.sequence_length or raise data.held_out"
        )
    return TokenRows(shards, length, document_mask)


def documents_of(tokens_BT: Tensor, end_of_text: int) -> Tensor:
    """(B, T) int64: how many documents ended in the row before each token."""
    return F.pad((tokens_BT == end_of_text).cumsum(1)[:, :-1], (1, 0))
