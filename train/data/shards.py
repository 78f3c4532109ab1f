"""Token shards: memory-mapped files of token ids, with an index that says what they are.

A folder holds `index.json` (schema version, vocabulary, dtype, and for every split its files with token counts and
SHA-256), raw little-endian `SPLIT-00000.bin` files, and the tokenizer's files. Documents follow one another, each
ended by the end-of-text token, and behind what the tokenizer puts before a text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import atomic_write_text, sha256_file
from penjing.core.manifest import check_inside, read_json_object

INDEX_NAME = "index.json"
SHARD_TOKENS = 1 << 26


class ShardFile(Config):
    """One file of token ids."""

    name: str = Field(description="Its name in the folder.")
    tokens: int = Field(ge=0, description="Tokens in it.")
    sha256: str = Field(description="SHA-256 of the file, hexadecimal.")


class ShardIndex(Config):
    """Content of `index.json`."""

    schema_version: Literal[1] = Field(default=1, description="Version of this format.")
    kind: Literal["token shards"] = Field(default="token shards", description="What the folder holds.")
    dtype: Literal["uint16", "uint32"] = Field(description="Type of a token id, little-endian.")
    vocab_size: int = Field(gt=0, description="Token ids are below it.")
    end_of_text: int = Field(description="The token id that ends a document.")
    begin_of_text: tuple[int, ...] = Field(
        default=(), description="The token ids that begin a document, and each sequence that is cut from the tokens."
    )
    source: dict[str, Any] = Field(default_factory=dict, description="What the tokens were made from.")
    splits: dict[str, tuple[ShardFile, ...]] = Field(description="The files of each split, in order.")

    @model_validator(mode="after")
    def _begins_within(self) -> ShardIndex:
        if wrong := [token for token in self.begin_of_text if not 0 <= token < self.vocab_size]:
            raise ValueError(f"begin_of_text: {wrong[0]} is outside the vocabulary of {self.vocab_size}")
        return self


class ShardWriter:
    """Writes the files of one split; `close` gives their entries for the index.

    Args:
        written: tokens of the split that an earlier writer had put down (`put_down`); it goes on behind them.
    """

    def __init__(
        self, folder: Path, split: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS, written: int = 0
    ) -> None:
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(shard_dtype(vocab_size)).newbyteorder("<")
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self._written = written
        self._pending: list[NDArray[Any]] = []
        self._num_pending = 0
        whole, rest = divmod(written, shard_tokens)
        if rest:  # what followed was not put down any more
            os.truncate(self._path(whole), rest * self._dtype.itemsize)

    def add(self, token_ids: Iterable[int]) -> None:
        """Append one document's tokens, end-of-text included.

        Raises:
            InputError: an id outside the vocabulary.
        """
        ids = np.asarray(token_ids if isinstance(token_ids, list) else list(token_ids), dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._vocab_size):
            raise InputError(
                f"token id {ids.max()} is outside the vocabulary of {self._vocab_size}; use the matching tokenizer"
            )
        self._pending.append(ids.astype(self._dtype))
        self._num_pending += ids.size
        if self._num_pending >= self._shard_tokens:
            self.put_down()

    def put_down(self) -> int:
        """Bring what was added to the disk; the tokens of the split so far."""
        tokens = np.concatenate(self._pending) if self._pending else np.empty(0, self._dtype)
        self._pending, self._num_pending = [], 0
        while tokens.size:
            shard, begin = divmod(self._written, self._shard_tokens)
            part = tokens[: self._shard_tokens - begin]
            with open(self._path(shard), "ab" if begin else "wb") as file:
                file.write(part.tobytes())
                file.flush()
                os.fsync(file.fileno())
            self._written += part.size
            tokens = tokens[part.size :]
        return self._written

    def close(self) -> tuple[ShardFile, ...]:
        """Write what is left."""
        self.put_down()
        sizes = [self._shard_tokens] * (self._written // self._shard_tokens)
        sizes += [rest] if (rest := self._written % self._shard_tokens) else []
        paths = [self._path(shard) for shard in range(len(sizes))]
        return tuple(
            ShardFile(name=path.name, tokens=size, sha256=sha256_file(path))
            for path, size in zip(paths, sizes, strict=True)
        )

    def _path(self, shard: int) -> Path:
        return self._folder / f"{self._split}-{shard:05d}.bin"


def shard_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The smallest of the two that holds every id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write `index.json`, last of all."""
    atomic_write_text(folder / INDEX_NAME, json.dumps(index.model_dump(), indent=2) + "\n")


def read_index(folder: Path) -> ShardIndex:
    """Read `index.json`.

    Raises:
        InputError: missing or malformed.
    """
    path = folder / INDEX_NAME
    if not path.exists():
        raise InputError(f"{folder} holds no {INDEX_NAME}; it is no folder of token shards: check data.shards")
    try:
        return parse_config(ShardIndex, read_json_object(path), str(path))
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged: make the shards again") from None


class TokenSequence(Protocol):
    """Tokens of a file."""

    def __getitem__(self, place: slice, /) -> NDArray[Any]: ...


class TokenShards:
    """One split of a folder of shards, as one long sequence of tokens.

    Raises:
        InputError: a file is missing, truncated or too long; the split is not there, or empty.
    """

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self.split = split
        if split not in self.index.splits:
            raise InputError(
                f"{folder} has no split {split!r}, only {', '.join(self.index.splits)}; give it more text, or set "
                "data.held_out (the share kept for evaluation) higher, or evaluation.every = 0"
            )
        self.dtype = np.dtype(self.index.dtype).newbyteorder("<")
        self._shards: list[TokenSequence] = []
        for file in self.index.splits[split]:
            check_inside(folder / INDEX_NAME, file.name)
            self._shards.append(self._open(file))
        self.ends = np.cumsum([file.tokens for file in self.index.splits[split]], dtype=np.int64)
        if not self._shards:
            raise InputError(f"split {split!r} of {folder} has no tokens; give it more text")

    def _open(self, file: ShardFile) -> TokenSequence:
        """The tokens of a file."""
        path = self.folder / file.name
        size = path.stat().st_size if path.exists() else -1
        self._check_size(str(path), file, size)
        return np.memmap(path, dtype=self.dtype, mode="r")

    def _check_size(self, name: str, file: ShardFile, size: int) -> None:
        wanted = file.tokens * self.dtype.itemsize
        if size != wanted or size == 0:
            found = "is missing" if size < 0 else f"has {size:,} bytes, not {wanted:,}"
            raise InputError(f"shard {name} {found}: it is empty or truncated; make the shards again")

    @property
    def num_tokens(self) -> int:
        """Tokens of the split."""
        return int(self.ends[-1])

    def read(self, begin: int, num_tokens: int) -> NDArray[np.int64]:
        """Tokens begin … begin + num_tokens - 1 as (num_tokens,) int64, across files where need be.

        Raises:
            InputError: an id outside the vocabulary.
        """
        parts: list[NDArray[Any]] = []
        shard = int(np.searchsorted(self.ends, begin, side="right"))
        offset = begin - (int(self.ends[shard - 1]) if shard else 0)
        missing = num_tokens
        while missing > 0:
            part = self._shards[shard][offset : offset + missing]
            parts.append(part)
            missing -= len(part)
            shard, offset = shard + 1, 0
        tokens = np.concatenate(parts).astype(np.int64)
        if tokens.max() >= self.index.vocab_size:
            raise InputError(
                f"{self.folder}, split {self.split!r}: token id {tokens.max()} near token {begin:,} is outside the "
                "vocabulary of "
                f"{self.index.vocab_size}; a shard is damaged: make the shards again"
            )
        return tokens

    def verify(self) -> None:
        """Check the SHA-256 of every file.

        Raises:
            InputError: names the first file that was changed.
        """
        for file in self.index.splits[self.split]:
            if sha256_file(self.folder / file.name) != file.sha256:
                raise InputError(f"shard {self.folder / file.name} is not what was written; make the shards again")
