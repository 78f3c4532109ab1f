"""Windows of long texts that overlap: each token is a target exactly once, and has at least so many tokens of its
document before it as the overlap says, where the document has them.

A window is cut where the text has a seam: behind a document, a paragraph or line, a sentence, and only where none of
these is in its second half, behind any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.config import Config
from penjing.core.errors import ConfigError, InputError
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.shards import TokenShards
from penjing.train.data.stream import TokenSamples
from penjing.train.data.tokens import documents_of
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


class ChunkRows(TokenSamples):
    """A window a sample, behind what begins a text; what is left of its row is filled up with the end of text. Neither
    is a target. `document_mask`: as of `TokenRows`."""

    def __init__(self, shards: TokenShards, chunks: Chunks, length: int, document_mask: bool = False) -> None:
        self._shards, self._chunks, self._length, self._document_mask = shards, chunks, length, document_mask

    def __len__(self) -> int:
        return len(self._chunks.begins)

    def read(self, samples: Sequence[int] | NDArray[np.int64]) -> Batch:
        """See `TokenSamples`."""
        end_of_text, chunks = self._shards.index.end_of_text, self._chunks
        before = torch.tensor(self._shards.index.begin_of_text, dtype=torch.int64)
        tokens = torch.full((len(samples), self._length), end_of_text, dtype=torch.int64)
        tokens[:, : len(before)] = before
        targets = torch.full((len(samples), self._length), IGNORED, dtype=torch.int64)
        for row, sample in enumerate(samples):
            context, begin, end = (int(each[sample]) for each in (chunks.context, chunks.begins, chunks.ends))
            window = torch.from_numpy(self._shards.read(context, end - context))
            first = len(before) - context  # where token 0 of the split would stand
            tokens[row, len(before) : first + end - 1] = window[:-1]
            targets[row, first + begin - 1 : first + end - 1] = window[begin - context :]
        batch = {"tokens": tokens, "targets": targets}
        if self._document_mask:
            batch["documents"] = documents_of(tokens, end_of_text)
        return batch


def _seam(seams_T: NDArray[np.int8]) -> int:
    """How many of the tokens a window takes: up to the last of the best seams in its second half."""
    half = len(seams_T) // 2
    late = seams_T[half:]
    best = late.max()
    return half + int(np.flatnonzero(late == best)[-1]) + 1 if best else len(seams_T)
