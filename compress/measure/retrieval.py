"""How near embeddings of a compressed encoder are to the original's, and whether they find the same documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.compress.measure.texts import Retrieval
from penjing.core.artifact.onnx_encoder import embed_in_batches
from penjing.core.models.encoder import Encoder
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokenizer, TextTokens

Embeddings = NDArray[np.float32]


@torch.no_grad()
def embed_with(model: Encoder, tokenizer: TextTokenizer, texts: list[str], progress: Progress) -> Embeddings:
    """(texts, hidden) in the order of `texts`; one step of progress for each text."""

    def run(batch: TextTokens) -> Embeddings:
        rows = model(*batch.tensors()).numpy()
        progress.advance(len(rows))
        return rows

    return embed_in_batches(tokenizer, texts, run)


def compare(retrieval: Retrieval, before: Embeddings, embed: Callable[[list[str]], Embeddings]) -> dict[str, Any]:
    """Cosines and retrieval of `embed` beside `before`, the original's embeddings of queries and then documents.

    `top1_unchanged` is the share of queries whose nearest document is the original's choice; `top1_…` the share whose
    nearest document is the paragraph that they begin. JSON-ready.
    """
    after = embed(retrieval.queries + retrieval.documents)
    count = len(retrieval.queries)
    cosines = (before * after).sum(1)
    first, second = (nearest(rows[:count], rows[count:]) for rows in (before, after))
    right = np.arange(count)
    return {
        "texts": 2 * count,
        "cosine_mean": float(cosines.mean()),
        "cosine_smallest": float(cosines.min()),
        "queries": count,
        "top1_unchanged": float((first == second).mean()),
        "top1_fp32": float((first == right).mean()),
        "top1_int8": float((second == right).mean()),
    }


def nearest(queries: Embeddings, documents: Embeddings) -> NDArray[np.int64]:
    """The index of the document with the largest cosine, of each query."""
    return (queries @ documents.T).argmax(1)
