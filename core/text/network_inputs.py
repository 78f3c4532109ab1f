"""Texts become what a graph that takes tokens takes: ids, and beside them masks, segments and positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from penjing.core.graph.config import TensorSpec
from penjing.core.text.text_tokenizer import TOKENIZER
from penjing.core.text.tokenizer import read_backend

Role = Literal["ids", "mask", "segments", "positions"]
_WORDS: dict[str, Role] = {"mask": "mask", "type": "segments", "segment": "segments", "position": "positions"}
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>", "</s>")


@dataclass(frozen=True)
class Texts:
    """How texts become the inputs of a network.

    Attributes:
        backend: text → token ids.
        roles: what each input holds, by its name; all are (batch, length).
        dtypes: of each input.
        length: of every text, where the network fixes it; None: the longest of a batch.
        padding: the id behind shorter texts.
    """

    backend: Backend
    roles: Mapping[str, Role]
    dtypes: Mapping[str, str]
    length: int | None
    padding: int

    def arrays(self, texts: Sequence[str], most: int) -> dict[str, NDArray[Any]]:
        """(texts, length) of each input; texts of more than `most` tokens (and than `length`) are cut."""
        most = min(most, self.length or most)
        self.backend.enable_truncation(most)
        rows = [encoding.ids for encoding in self.backend.encode_batch(list(texts))]
        length = self.length or max(1, *map(len, rows))
        found = {name: np.zeros((len(rows), length), self.dtypes[name]) for name in self.roles}
        for name, role in self.roles.items():
            if role == "ids":
                found[name][:] = self.padding
            if role == "positions":
                found[name][:] = np.arange(length)
            for place, row in enumerate(rows):
                if role in ("ids", "mask"):
                    found[name][place, : len(row)] = row if role == "ids" else 1
        return found


def texts_of(folder: Path, inputs: Sequence[TensorSpec]) -> Texts | None:
    """How texts become `inputs` of the network in `folder`; None if it has no tokenizer, or they are no tokens.

    Raises:
        InputError: the tokenizer is damaged.
    """
    path = folder / TOKENIZER
    roles = roles_of(inputs)
    if not path.is_file() or roles is None:
        return None
    backend = read_backend(path)
    backend.no_padding()
    known = [found for token in _PADDING if (found := backend.token_to_id(token)) is not None]
    fixed = {spec.shape[1] for spec in inputs if isinstance(spec.shape[1], int)}
    return Texts(
        backend,
        roles,
        {spec.name: spec.dtype for spec in inputs},
        min(fixed) if fixed else None,
        known[0] if known else 0,
    )


def roles_of(inputs: Sequence[TensorSpec]) -> dict[str, Role] | None:
    """What each input holds of a text; None where they are not token ids with what may stand beside them."""
    roles: dict[str, Role] = {}
    word: Role
    for spec in inputs:
        said: list[Role] = [role for part, role in _WORDS.items() if part in spec.name.lower()]
        word = said[0] if said else "ids"
        whole = spec.dtype.startswith(("int", "uint")) or (word == "mask" and spec.dtype in ("bool", "float32"))
        if len(spec.shape) != 2 or not whole:
            return None
        roles[spec.name] = word
    return roles if list(roles.values()).count("ids") == 1 else None
