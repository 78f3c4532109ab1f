"""Duplicates, exact or near: the only step that sees all documents at once.

Each process writes keys of its documents, and one process joins equal keys into clusters, a column at a time: 16
bytes of memory a document, and 112 bytes of disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penjing.core.config import Config
from penjing.core.text.near_duplicates import BUCKETS, ROWS, Signer
from penjing.curate.documents.document import Document


class DedupStep(Config):
    """Keep one of each cluster of duplicates."""

    kind: Literal["dedup"] = Field(description="One document of those that are alike.")
    method: Literal["exact", "minhash"] = Field(
        default="minhash", description="Equal texts, or texts whose runs of five words overlap by 0.8 and more."
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

    @property
    def rule(self) -> str:
        """What a dropped document is told."""
        return "equal text" if self.method == "exact" else "near duplicate"

    def keys(self) -> Callable[[Document], NDArray[np.uint64]]:
        """Maps a document to its (buckets,) keys; documents with an equal key in a place are duplicates."""
        if self.method == "exact":
            return lambda document: np.array([_hash64(document.text, self._of(document))], np.uint64)
        signer = Signer(self.buckets, self.rows)

        def near(document: Document) -> NDArray[np.uint64]:
            return signer.keys(document.text) ^ np.uint64(_hash64(self._of(document)))

        return near

    def _of(self, document: Document) -> str:
        return "" if self.scope == "all" else str(getattr(document, self.scope))


def _hash64(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
