"""Batches of token sequences from shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penjing.core.errors import ConfigError
from penjing.train.data.order import Order
from penjing.train.data.shards import TokenShards
from penjing.train.objective.objective import IGNORED, Batch


class TokenStream:
    """Endless micro-batches {"tokens": (B, T), "targets": (B, T)}, int64; targets are the tokens one place on.

    With `document_mask`, "documents" (B, T) int64 too: how many documents ended in the row before each token.
    Sample i is the shards' tokens i·T … i·T + T, so that every token but the first is a target once an epoch.

    Raises:
        InputError: fewer than T + 1 tokens.
    """

    def __init__(
        self,
        shards: TokenShards,
        sequence_length: int,
        *,
        batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        document_mask: bool = False,
    ) -> None:
        self._shards = shards
        self._document_mask = document_mask
        self._length = sequence_length
        num_samples = (shards.num_tokens - 1) // sequence_length
        self.samples = np.empty(0, dtype=np.int64)  # those of the last batch
        self.order = Order(num_samples, batch_size, micro_batch, rank, world_size, seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        _, self.samples = self.order.next()
        batch = token_batch(self._shards, self.samples, self._length, self._document_mask)
        batch["targets"][torch.from_numpy(~self.order.real)] = IGNORED
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position; see `Order`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see `Order`."""
        self.order.load_state_dict(state)


def held_out_tokens(
    shards: TokenShards,
    sequence_length: int,
    *,
    micro_batch: int,
    max_samples: int,
    rank: int = 0,
    world_size: int = 1,
    document_mask: bool = False,
) -> Iterator[Batch]:
    """One pass over the first `max_samples` sequences: this process's share, at least one batch, padded with ignored
    targets.

    Raises:
        ConfigError: the split has no complete sequence.
    """
    num_samples = min((shards.num_tokens - 1) // sequence_length, max_samples)
    if num_samples < 1:
        raise ConfigError(
            f"split {shards.split!r} of {shards.folder} has {shards.num_tokens} tokens, less than one sequence of "
            f"{sequence_length} + 1; lower data.sequence_length or raise data.held_out"
        )
    per_round = micro_batch * world_size
    for begin in range(rank * micro_batch, -(-num_samples // per_round) * per_round, per_round):
        samples = np.arange(begin, begin + micro_batch)
        real = samples < num_samples
        batch = token_batch(shards, np.where(real, samples, 0), sequence_length, document_mask)
        batch["targets"][torch.from_numpy(~real)] = IGNORED
        yield batch


def token_batch(shards: TokenShards, samples: np.ndarray[Any, Any], length: int, document_mask: bool) -> Batch:
    """The sequences `samples` as `TokenStream` gives them."""
    rows = torch.from_numpy(np.stack([shards.read(int(sample) * length, length + 1) for sample in samples]))
    batch = {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}
    if document_mask:
        ended = (batch["tokens"] == shards.index.end_of_text).cumsum(1)
        batch["documents"] = F.pad(ended[:, :-1], (1, 0))
    return batch
