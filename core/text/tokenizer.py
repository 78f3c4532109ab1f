"""Text ⇄ token ids from `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from penjing.core.errors import InputError
from penjing.core.manifest import read_json_object
from penjing.core.models.hf_config import token_ids


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        vocab_size: largest token id + 1 (the embedding may have more rows).
        longest_token: bytes of the longest token, as the vocabulary spells it.
        eos_token_ids: ids that end a text, of the model and of the tokenizer.
        bos_token_id: id that begins a text, or None.
        begin: ids that the tokenizer puts before every text; of many tokenizers none.
        special_ids: ids of control tokens, left out of decoded text.
    """

    def __init__(self, backend: Backend, eos_token_ids: Iterable[int] = (), bos_token_id: int | None = None) -> None:
        self.backend = backend
        backend.no_truncation()
        backend.no_padding()
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.bos_token_id = bos_token_id
        added = backend.get_added_tokens_decoder()
        # A byte-level vocabulary spells each byte as a character.
        self._byte_level = type(backend.decoder).__name__ == "ByteLevel"
        as_they_are = {token.content for token in added.values()} if self._byte_level else vocab
        self.longest_token = max((len(token.encode() if token in as_they_are else token) for token in vocab), default=0)
        self._strips = any(token.lstrip or token.rstrip for token in added.values())
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._literal: Backend | None = None
        self.begin = tuple(_added_before(backend))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load from `tokenizer.json`, `tokenizer_config.json`, `config.json` and `generation_config.json`.

        Raises:
            InputError: `tokenizer.json` is missing or malformed; an id in the other files is not an id.
        """
        path = folder / "tokenizer.json"
        backend = read_backend(path)
        files = ("tokenizer_config.json", "config.json", "generation_config.json")
        named, model, generation = (_optional_json(folder / name) for name in files)
        begin, end = (_id_of(backend, named.get(key)) for key in ("bos_token", "eos_token"))
        stops = [*token_ids(model.get("eos_token_id")), *token_ids(generation.get("eos_token_id"))]
        stops += [] if end is None else [end]
        first = begin if begin is not None else model.get("bos_token_id")
        for token_id in [*stops, *([] if first is None else [first])]:
            # a bool is an int to Python, and the backend takes 32 bits
            valid = type(token_id) is int and 0 <= token_id < 1 << 32
            if not valid or backend.id_to_token(token_id) is None:
                raise InputError(f"{folder}: begin- or end-of-text token {token_id!r} is not in {path.name}")
        return cls(backend, stops, first)

    def encode(self, text: str, allow_special: bool = True, add_special: bool = True) -> list[int]:
        """Ids of `text`.

        Args:
            allow_special: text such as `<|im_end|>` becomes the control token; else it is ordinary text.
            add_special: put begin-of-text first where the tokenizer does so; off for rendered chat templates,
                which write it themselves. End-of-text, which some tokenizers add too, is left out: what is encoded
                goes on, with an answer or a choice.
        """
        backend = self.backend if allow_special else self._literal_backend()
        return self._begun(backend.encode(text, add_special_tokens=False).ids, add_special)

    def encode_beside(self, text: str, add_special: bool = True) -> list[int]:
        """`encode` without holding Python's lock, so that other threads go on: a megabyte takes most of a second."""
        return self._begun(self.backend.encode_batch([text], add_special_tokens=False)[0].ids, add_special)

    def _begun(self, ids: list[int], add_special: bool) -> list[int]:
        return [*self.begin, *ids] if add_special else ids

    def most_bytes(self, num_tokens: int) -> int:
        """Bytes of UTF-8 beyond which no text has as few as `num_tokens` tokens."""
        # Others may shorten a text, by Unicode normalization or by dropping spaces, hardly to a quarter.
        exact = self._byte_level and self.backend.normalizer is None and not self._strips
        return num_tokens * self.longest_token * (1 if exact else 4)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token are left out."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        return self.backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of `token_id`, or None."""
        return self.backend.id_to_token(token_id)

    def _literal_backend(self) -> Backend:
        if self._literal is None:
            self._literal = Backend.from_str(self.backend.to_str())
            self._literal.encode_special_tokens = True
        return self._literal


def read_backend(path: Path) -> Backend:
    """The tokenizer in the file `path`.

    Raises:
        InputError: it is missing or malformed.
    """
    read_json_object(path)
    try:
        return Backend.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library reports everything as a bare Exception, or panics, which is none
        raise InputError(f"{path} is not a tokenizer ({error}); get or make it again") from error


def _added_before(backend: Backend) -> list[int]:
    """Ids that the backend puts before every text."""
    if not backend.encode("").ids:
        return []
    some = backend.encode("a")
    return some.ids[: [*some.special_tokens_mask, 0].index(0)]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _id_of(backend: Backend, token: Any) -> int | None:
    """Id of a token given as text or as an object with `content`, as tokenizer_config.json may."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None
