"""Paragraphs of Python's help topics or of the user, and whether embeddings of their first sentences find them again.

Some paragraphs calibrate a text encoder, others evaluate it: a query is the first sentence of a paragraph, its document
the paragraph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penjing.compress.samples.text import CALIBRATE, EVALUATE
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx_encoder import embed_in_batches, open_encoder_artifact
from penjing.core.checkpoint.encoder import load_encoder
from penjing.core.errors import InputError
from penjing.core.progress import Progress
from penjing.core.text.corpus import TOPIC_GAP, calibration_text, heldout_text
from penjing.core.text.documents import read_documents
from penjing.core.text.text_tokenizer import TextTokenizer, TextTokens

Embeddings = NDArray[np.float32]
T = TypeVar("T")
SHORTEST = 40  # characters: headings and stray lines are left out


@dataclass(frozen=True)
class Retrieval:
    """`queries[i]` is the first sentence of the paragraph `documents[i]`; documents without a query come last."""

    queries: list[str]
    documents: list[str]

    def texts(self) -> list[str]:
        """Queries, then documents: the order of the rows of embeddings."""
        return self.queries + self.documents


def calibration_paragraphs(count: int) -> list[str]:
    """`count` paragraphs, evenly spread over the text.

    Raises:
        InputError: the text has fewer.
    """
    return _spread(_paragraphs(calibration_text()), count, "data.texts")


def own_paragraphs(paths: Sequence[Path], count: int, setting: str = CALIBRATE) -> list[str]:
    """At most `count` of the user's own texts, evenly spread over them: paragraphs of files, lines of JSONL files.

    Args:
        setting: which names the files, for messages.

    Raises:
        InputError: as `read_documents`; a conversation; or all of it is empty.
    """
    found: list[str] = []
    for document in read_documents(paths, setting):
        if document.text is None:
            raise InputError(f'{document.name}: text encoders have no conversations; give "text"')
        found += _paragraphs(document.text, shortest=1)
    texts = list(dict.fromkeys(found))
    if not texts:
        raise InputError(f"{setting}: the files hold no text; give some")
    return _spread(texts, min(count, len(texts)), setting)


def retrieval_set(count: int) -> Retrieval:
    """`count` held-out paragraphs of two sentences or more.

    Raises:
        InputError: the text has fewer.
    """
    found = [text for text in _paragraphs(heldout_text()) if _first_sentence(text) is not None]
    return _with_queries(_spread(found, count, "evaluate.texts"))


def own_retrievals(texts: Mapping[str, Path], count: int) -> dict[str, Retrieval]:
    """The user's own held-out texts by name, at most `count` paragraphs of each; see `own_paragraphs`."""
    return {name: _with_queries(own_paragraphs([path], count, f"{EVALUATE}.{name}")) for name, path in texts.items()}


def _with_queries(texts: list[str]) -> Retrieval:
    asked = {text: first for text in texts if (first := _first_sentence(text)) is not None}
    return Retrieval(list(asked.values()), [*asked, *(text for text in texts if text not in asked)])


def _first_sentence(text: str) -> str | None:
    """None where the text is one sentence, or either part is too short to mean something."""
    first, _, others = text.partition(". ")
    return f"{first}." if min(len(first), len(others)) >= SHORTEST // 2 else None


def embeddings(folder: Path, texts: list[str], progress: Progress) -> Embeddings:
    """(texts, hidden) by the checkpoint or the INT8 artifact in `folder`; a step of progress for each text.

    Raises:
        InputError: damaged, or of another kind.
    """
    if is_artifact(folder):
        artifact = open_encoder_artifact(folder)
        rows = artifact.embed(artifact.session(torch.get_num_threads()), texts)
        progress.advance(len(texts))
        return rows
    model = load_encoder(folder)
    return embed_with(model, TextTokenizer(folder, model.config), texts, progress)


@torch.no_grad()
def embed_with(
    model: Callable[..., Tensor], tokenizer: TextTokenizer, texts: list[str], progress: Progress
) -> Embeddings:
    """(texts, hidden) in the order of `texts`, by `model` of ids and mask; one step of progress for each text."""

    def run(batch: TextTokens) -> Embeddings:
        rows = model(*batch.tensors()).numpy()
        progress.advance(len(rows))
        return rows

    return embed_in_batches(tokenizer, texts, run)


def nearest(queries: Embeddings, documents: Embeddings) -> NDArray[np.int64]:
    """The index of the document with the largest cosine, of each query."""
    return (queries @ documents.T).argmax(1)


def _paragraphs(text: str, shortest: int = SHORTEST) -> list[str]:
    lines = (" ".join(paragraph.split()) for paragraph in text.split(TOPIC_GAP))
    return list(dict.fromkeys(line for line in lines if len(line) >= shortest))


def _spread(values: list[T], count: int, setting: str) -> list[T]:
    if count > len(values):
        raise InputError(f"{setting}={count}: there are {len(values)} such paragraphs; ask for fewer")
    return [values[index * len(values) // count] for index in range(count)]
