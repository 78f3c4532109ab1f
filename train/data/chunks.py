"""Windows of long texts that overlap: each token is a target exactly once, and has at least so many tokens of its
document before it as the overlap says, where the document has them.

A window is cut where the text has a seam: behind a document, a paragraph or line, a sentence, and only where none of
these is in its second half, behind any token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.config import Config
from penjing.core.errors import ConfigError, InputError
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.order import Order
from penjing.train.data.shards import TokenShards
from penjing.train.objective.objective import IGNORED, Batch

_SENTENCE_ENDS = (".", "!", "?", "。", "！", "？", "…")


class ChunkConfig(Config):
    """Windows that overlap."""

    overlap: int = Field(ge=0, description="Tokens before a window's own that are read as context and are no targets.")
    boundary: Literal["hybrid", "token"] = Field(
        default="hybrid",
        description='Where a window ends: "hybrid" at a document, paragraph, line or sentence in its second half, if '
        'there is one; "token" when it is full.',
    )


@dataclass(frozen=True)
class Chunks:
    """Windows of a split, in order.

    Attributes:
        context, begins, ends: (windows,) int64 each. The targets of a window are the tokens begins … ends - 1, its
            inputs those from `context` on.
    """

    context: NDArray[np.int64]
    begins: NDArray[np.int64]
    ends: NDArray[np.int64]


def seams(tokenizer: Tokenizer, size: int, end_of_text: int) -> NDArray[np.int8]:
    """(size,): how good a place the end of each token is to cut: 4 behind a document, 3 an empty line, 2 a line, 1 a
    sentence, 0 none of these."""
    found = np.zeros(size, np.int8)
    for token in range(min(size, tokenizer.vocab_size)):
        text = tokenizer.decode([token], skip_special=False)
        if "\n" in text:
            found[token] = 3 if "\n\n" in text else 2
        elif text.rstrip().endswith(_SENTENCE_ENDS):
            found[token] = 1
    found[end_of_text] = 4
    return found


def cut(shards: TokenShards, length: int, overlap: int, seams_V: NDArray[np.int8] | None) -> Chunks:
    """The windows of a split.

    Args:
        length: inputs of a window at most.
        seams_V: see `seams`; None cuts where a window is full.

    Raises:
        ConfigError: the overlap leaves no room.
        InputError: fewer than two tokens.
    """
    if overlap >= length:
        raise ConfigError(
            f"data.chunks.overlap={overlap} leaves a window of data.sequence_length={length} no target; lower it"
        )
    total, end_of_text = shards.num_tokens, shards.index.end_of_text
    if total < 2:
        raise InputError(f"split {shards.split!r} of {shards.folder} has {total} tokens; give it more text")
    rows: list[tuple[int, int, int]] = []
    begin, document = 1, 0  # the first target, and where the document before it begins, counted from its separator
    while begin < total:
        context = max(begin - 1 - overlap, document)
        room = min(context + length + 1 - begin, total - begin)
        tokens = shards.read(begin, room)
        taken = room if begin + room == total or seams_V is None else _seam(seams_V[tokens])
        rows.append((context, begin, begin + taken))
        ended = np.flatnonzero(tokens[:taken] == end_of_text)
        document = begin + int(ended[-1]) if len(ended) else document
        begin += taken
    context, begins, ends = np.array(rows, np.int64).T
    return Chunks(context, begins, ends)


class ChunkStream:
    """Endless micro-batches as `TokenStream` gives them, a window a row; what is left of a row is filled up with the
    end of text, and is no target."""

    def __init__(
        self,
        shards: TokenShards,
        chunks: Chunks,
        sequence_length: int,
        *,
        batch_size: int,
        micro_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        document_mask: bool = False,
    ) -> None:
        self._shards, self._chunks, self._length, self._mask = shards, chunks, sequence_length, document_mask
        self.order = Order(len(chunks.begins), batch_size, micro_batch, rank, world_size, seed)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        _, samples = self.order.next()
        batch = chunk_batch(self._shards, self._chunks, samples, self._length, self._mask)
        batch["targets"][torch.from_numpy(~self.order.real)] = IGNORED
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position; see `Order`."""
        return self.order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; see `Order`."""
        self.order.load_state_dict(state)


def held_out_chunks(
    shards: TokenShards,
    chunks: Chunks,
    length: int,
    *,
    micro_batch: int,
    max_samples: int,
    rank: int = 0,
    world_size: int = 1,
    document_mask: bool = False,
) -> Iterator[Batch]:
    """One pass over the first `max_samples` windows: this process's share, padded with ignored targets."""
    count = min(len(chunks.begins), max_samples)
    per_round = micro_batch * world_size
    for begin in range(rank * micro_batch, -(-count // per_round) * per_round, per_round):
        samples = np.arange(begin, begin + micro_batch)
        batch = chunk_batch(shards, chunks, np.where(samples < count, samples, 0), length, document_mask)
        batch["targets"][torch.from_numpy(samples >= count)] = IGNORED
        yield batch


def chunk_batch(
    shards: TokenShards, chunks: Chunks, samples: NDArray[np.int64], length: int, document_mask: bool
) -> Batch:
    """The windows `samples` as {"tokens": (B, T), "targets": (B, T)}, int64, and "documents" as `TokenStream` does."""
    end_of_text = shards.index.end_of_text
    tokens = torch.full((len(samples), length), end_of_text, dtype=torch.int64)
    targets = torch.full((len(samples), length), IGNORED, dtype=torch.int64)
    for row, sample in enumerate(samples.tolist()):
        context, begin, end = (int(each[sample]) for each in (chunks.context, chunks.begins, chunks.ends))
        window = torch.from_numpy(shards.read(context, end - context))
        tokens[row, : end - 1 - context] = window[:-1]
        targets[row, begin - 1 - context : end - 1 - context] = window[begin - context :]
    batch = {"tokens": tokens, "targets": targets}
    if document_mask:
        batch["documents"] = F.pad((tokens == end_of_text).cumsum(1)[:, :-1], (1, 0))
    return batch


def _seam(seams_T: NDArray[np.int8]) -> int:
    """How many of the tokens a window takes: up to the last of the best seams in its second half."""
    half = len(seams_T) // 2
    late = seams_T[half:]
    best = late.max()
    return half + int(np.flatnonzero(late == best)[-1]) + 1 if best else len(seams_T)
