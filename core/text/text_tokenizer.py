"""Folders of text encoders, as far as a server needs them: configuration and tokenizer; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.models.encoder_config import EncoderConfig, encoder_config_from_hf
from penjing.core.text.tokenizer import read_backend

TOKENIZER, LIMITS = "tokenizer.json", "sentence_bert_config.json"


class Readable(Protocol):
    """What a tokenizer must know of a network of texts."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...


@dataclass(frozen=True)
class TextTokens:
    """Token ids and mask of a batch of texts, (batch, seq) int64 both; the mask is 0 where padding is."""

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]

    def tensors(self) -> tuple[Any, Any]:
        """The arguments of an `Encoder`."""
        import torch

        return torch.from_numpy(self.ids), torch.from_numpy(self.mask)


class TextTokenizer:
    """Texts → padded batches; longer texts are cut at `max_tokens`, as sentence-transformers does.

    Raises:
        InputError: `tokenizer.json` is missing, malformed, or names tokens that the model has no embedding for.
    """

    def __init__(self, folder: Path, config: Readable) -> None:
        path = folder / TOKENIZER
        self._backend = read_backend(path)
        largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= config.vocab_size:
            raise InputError(
                f"{path} has a token {largest}, the model's embedding only {config.vocab_size} rows; "
                "the files do not belong together"
            )
        self.config = config
        self.max_tokens = _longest_text(folder, config)
        self._backend.enable_truncation(self.max_tokens)
        self._backend.no_padding()

    def __call__(self, texts: list[str]) -> TextTokens:
        """Raises InputError for an empty list: there would be nothing to run."""
        return pad(self.rows(texts))

    def rows(self, texts: list[str]) -> list[list[int]]:
        """The token ids of each text, without padding.

        Raises:
            InputError: there is no text, or something else among them.
        """
        if not texts:
            raise InputError("there is no text to embed; give one or more")
        try:
            return [encoding.ids for encoding in self._backend.encode_batch(texts)]
        except TypeError:  # that names none
            raise InputError(_no_text(texts)) from None

    def text_of(self, ids: list[int]) -> str | None:
        """The text whose tokens these are, with the marks that stand before and behind each text; None where there is
        none, as of another tokenizer's ids."""
        marks = self._backend.encode("a").special_tokens_mask
        before, behind = marks.index(0), marks[::-1].index(0)
        try:
            text = self._backend.decode(ids[before : len(ids) - behind], skip_special_tokens=False)
        except OverflowError:  # an id that no tokenizer has
            return None
        kept = ids
        if len(ids) > self.max_tokens:  # cut, as the text is
            kept = ids[: self.max_tokens - behind] + ids[len(ids) - behind :]
        return text if self.rows([text])[0] == kept else None


def as_texts(texts: Any) -> list[str]:
    """A text, or several, as a list; what is neither is refused by `TextTokenizer.rows`."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        return [cast("str", texts)]
    return list(texts)


def _no_text(texts: Sequence[Any]) -> str:
    """What is wrong with the first of `texts` that is none."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {number} is {type(text).__name__}; give a str"
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"text {number} cannot be written in UTF-8 ({error.reason} at sign {error.start})"
    return "these texts cannot be read; give a list of str"


def pad(rows: list[list[int]]) -> TextTokens:
    """One batch of `rows`, padded to the longest."""
    ids, mask = np.zeros((2, len(rows), max(map(len, rows))), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return TextTokens(ids, mask)


def encoder_config(folder: Path) -> EncoderConfig:
    """The content of an encoder's `config.json`.

    Raises:
        InputError: missing, damaged, or of another kind.
    """
    path = folder / "config.json"
    return encoder_config_from_hf(read_json_object(path), str(path))


def _longest_text(folder: Path, config: Readable) -> int:
    path = folder / LIMITS
    if not path.exists():
        return config.max_position_embeddings
    longest = read_json_object(path).get("max_seq_length") or config.max_position_embeddings
    if type(longest) is not int or not 3 <= longest <= config.max_position_embeddings:
        raise InputError(
            f"{path}: max_seq_length={longest!r} must be 3 … {config.max_position_embeddings}, the model's positions"
        )
    return longest
