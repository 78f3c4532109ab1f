"""Duplicates, exact or near: the only step that sees all documents at once.

Each process writes keys of its documents, and one process joins them into clusters: equal and near texts by equal keys,
a column at a time (16 bytes of memory a document, and 112 bytes of disk), and texts that say the same by the angle
between their vectors (4 kB of memory a document, 776 bytes of disk).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from penjing.core.config import Config
from penjing.core.text.near_duplicates import BUCKETS, ROWS, Signer
from penjing.curate.documents.document import Document
from penjing.curate.learned.encoder import DocumentEncoder, encoder_files
from penjing.curate.learned.meaning import packed

_OF_A_METHOD = {
    "buckets": "minhash", "rows": "minhash",
    "encoder": "semantic", "least": "semantic", "windows": "semantic", "languages": "semantic",
}  # fmt: skip


class DedupStep(Config):
    """Keep one of each cluster of duplicates."""

    kind: Literal["dedup"] = Field(description="One document of those that are alike.")
    method: Literal["exact", "minhash", "semantic"] = Field(
        default="minhash",
        description="Equal texts, texts whose runs of five words overlap by 0.8 and more, or texts that say the same "
        "to a text encoder.",
    )
    scope: Literal["all", "source", "domain", "language"] = Field(
        default="all", description="Among which documents duplicates are looked for."
    )
    keep: Literal["first", "all"] = Field(
        default="first",
        description='"all" drops none and writes down clusters alone, by which training splits off its held-out text.',
    )
    buckets: int = Field(default=BUCKETS, ge=1, le=64, description="Of a signature; more find less similar texts.")
    rows: int = Field(default=ROWS, ge=1, le=32, description="Of a bucket; more find only more similar texts.")

    encoder: Path = Field(
        default=Path("build/minilm-int8"),
        description='For "semantic": the artifact of a text encoder, as recipes/minilm-int8.toml makes it.',
    )
    least: float = Field(
        default=0.95,
        gt=0,
        lt=1,
        description='For "semantic": the cosine from which two documents say the same.',
    )
    windows: int = Field(
        default=4,
        ge=1,
        le=64,
        description='For "semantic": pieces of 1000 characters of a document that the encoder reads.',
    )
    languages: tuple[str, ...] = Field(
        default=("en",),
        description='For "semantic": documents of other languages are left as they are, since an encoder takes texts '
        "that it cannot read for one another. Documents whose language no step has told are looked at.",
    )

    @model_validator(mode="after")
    def _settings_are_of_the_method(self) -> DedupStep:
        # What a plan stores has every setting, so that only one that differs from its default was meant.
        for setting, method in _OF_A_METHOD.items():
            if method != self.method and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f'{setting} is of method = "{method}", not of "{self.method}": leave it out')
        return self

    @property
    def rule(self) -> str:
        """What a dropped document is told."""
        return {"exact": "equal text", "minhash": "near duplicate", "semantic": "same meaning"}[self.method]

    def files(self) -> tuple[Path, ...]:
        """Files whose content the step depends on, beside its settings.

        Raises:
            InputError: the encoder is not there.
        """
        return encoder_files(self.encoder) if self.method == "semantic" else ()

    def keys(self) -> Callable[[Document], NDArray[np.uint64]]:
        """Maps a document to its row of keys: documents with an equal key in a place are duplicates. Rows of "semantic"
        are for `learned.meaning`.

        Raises:
            InputError: the encoder is damaged.
        """
        if self.method == "exact":
            return lambda document: np.array([_hash64(document.text, self._of(document))], np.uint64)
        if self.method == "semantic":
            return self._meanings()
        signer = Signer(self.buckets, self.rows)

        def near(document: Document) -> NDArray[np.uint64]:
            return signer.keys(document.text) ^ np.uint64(_hash64(self._of(document)))

        return near

    def _meanings(self) -> Callable[[Document], NDArray[np.uint64]]:
        encoder = DocumentEncoder(self.encoder, self.windows)

        def meaning(document: Document) -> NDArray[np.uint64]:
            read = not document.language or document.language in self.languages
            return packed(_hash64(self._of(document)), encoder(document.text), known=read)

        return meaning

    def _of(self, document: Document) -> str:
        return "" if self.scope == "all" else str(getattr(document, self.scope))


def _hash64(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
