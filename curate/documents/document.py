"""A document on its way through the steps, and the tables that hold documents between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penjing.core.text.records import arrow_module
from penjing.curate.documents.rows import RowWriter

BEGINNING = 18_000  # characters of an excerpt, of which 200 are shown: two private keys have up to 16 200
_GROUP_CHARS = 16 << 20  # of text in one row group: what is held in memory
_COLUMNS = {
    **dict.fromkeys(("id", "text", "source", "domain", "licence", "language"), "string"),
    "language_share": "float",
    "cluster": "string",
    "changed": "string",
    "quality": "float",
    "noise": "float",
    "made": "string",
}


@dataclass
class Document:
    """A text and what is known of it.

    Attributes:
        id: its source, file and line; unique in a corpus.
        language: ISO code, "" while it is unknown; `language_share`: how sure that is, 0 to 1.
        cluster: the id of the first document of its near duplicates, "" while they were not looked for.
        quality, noise: what the steps of these names gave it, 0 to 1; None where they did not judge it.
        changed: what steps have done to the text.
        made: how the step `augment` made it out of another document, "" of one that was read.
    """

    id: str
    text: str
    source: str
    domain: str
    licence: str = ""
    language: str = ""
    language_share: float = 0.0
    cluster: str = ""
    changed: list[str] = field(default_factory=list)
    quality: float | None = None
    noise: float | None = None
    made: str = ""


@dataclass(frozen=True)
class Dropped:
    """A document that a step took out, with the rule that it broke.

    Attributes:
        chars: of its text then; excerpt: how that began, longer than what is shown of it.
        twin: the document that was kept in its place, "" for none.
        quality, noise: as of `Document`.
    """

    id: str
    step: str
    rule: str
    source: str
    domain: str
    language: str
    chars: int
    excerpt: str
    twin: str = ""
    quality: float | None = None
    noise: float | None = None


def drop(document: Document, step: str, rule: str) -> Dropped:
    """`document`, taken out by `rule` of `step`."""
    excerpt = " ".join(document.text.split())[:BEGINNING]
    return Dropped(
        document.id, step, rule, document.source, document.domain, document.language, len(document.text), excerpt,
        quality=document.quality, noise=document.noise,
    )  # fmt: skip


class DocumentWriter(RowWriter):
    """Writes documents into one Parquet file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _COLUMNS, _GROUP_CHARS)

    def add(self, document: Document) -> None:
        """Append `document`."""
        self.write({**vars(document), "changed": json.dumps(document.changed)}, len(document.text))


def stored_documents(path: Path) -> Iterator[Document]:
    """The documents that `DocumentWriter` wrote, in order."""
    with arrow_module("parquet", path).ParquetFile(path) as table:
        for batch in table.iter_batches(256):
            for row in batch.to_pylist():
                yield Document(**{**row, "changed": json.loads(row["changed"])})
