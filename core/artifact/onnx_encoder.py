"""Artifact folders of quantized text encoders; see `onnx.py`.

config.json is as BERT's; tokenizer.json and `sentence_bert_config.json`, which holds the longest text, stand beside it;
model.onnx takes "input_ids" and "attention_mask" (batch, sequence) int64 and gives "embedding" (batch, hidden).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.base import MODEL_FILE, PARITY_FILE
from penjing.core.artifact.onnx import OnnxArtifact, open_onnx_artifact
from penjing.core.artifact.parity import Difference, Parity, measured
from penjing.core.errors import InputError
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.runtime.onnx_runtime import open_graph
from penjing.core.text.text_tokenizer import TOKENIZER, TextTokenizer, TextTokens, encoder_config, pad

IDS, MASK, OUTPUT = "input_ids", "attention_mask", "embedding"
BATCH_TOKENS = 512  # with padding, in one run of `EncoderArtifact.embed`: what lies between layers stays in cache
QUANTITY = "cosine distance"


@dataclass(frozen=True)
class EncoderArtifact(OnnxArtifact):
    """A verified artifact folder."""

    config: EncoderConfig
    tokenizer: TextTokenizer

    def session(self, threads: int = 0) -> Any:
        """An ONNX Runtime session with the options that the artifact asks for."""
        options = self.quantization.session_options
        return open_encoder_session(self.folder / MODEL_FILE, options, threads=threads)

    def embed(self, session: Any, texts: list[str]) -> NDArray[np.float32]:
        """(texts, hidden) embeddings of length 1, in the order of `texts`."""
        return embed_texts(session, self.tokenizer, texts)


def open_encoder_session(
    path: Path, entries: dict[str, str] | None = None, *, threads: int = 0, optimise: bool = True
) -> Any:
    """A session of an encoder's file; see `open_graph`."""
    return open_graph(path, entries, threads=threads, optimise=optimise, names=([IDS, MASK], [OUTPUT]))


def embed_texts(session: Any, tokenizer: TextTokenizer, texts: list[str]) -> NDArray[np.float32]:
    """(texts, hidden) embeddings of length 1 by ONNX Runtime; see `embed_in_batches`."""
    return embed_in_batches(tokenizer, texts, lambda batch: session.run(None, {IDS: batch.ids, MASK: batch.mask})[0])


def embed_in_batches(
    tokenizer: TextTokenizer, texts: list[str], run: Callable[[TextTokens], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """(texts, hidden) in the order of `texts`; those of similar length go through `run` together.

    As many as `BATCH_TOKENS` hold, at least one.

    Raises:
        InputError: there is no text.
    """
    rows = tokenizer.rows(texts)
    found: dict[int, NDArray[np.float32]] = {}
    for chosen in similar_lengths([len(row) for row in rows]):
        found |= dict(zip(chosen, run(pad([rows[index] for index in chosen])), strict=True))
    return np.stack([found[index] for index in range(len(texts))])


def similar_lengths(lengths: list[int]) -> Iterator[list[int]]:
    """Indices of `lengths`, the shortest first, in batches that padded hold at most `BATCH_TOKENS`, or one text."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def open_encoder_artifact(folder: Path) -> EncoderArtifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    opened = open_onnx_artifact(folder, "encoder", also=(TOKENIZER,))
    config = encoder_config(folder)
    return EncoderArtifact(**vars(opened), config=config, tokenizer=TextTokenizer(folder, config))


def recorded_texts(parity: Parity) -> list[str]:
    """The texts of a parity record.

    Raises:
        InputError: the record is damaged.
    """
    texts = parity.inputs.get("texts")
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{PARITY_FILE} is damaged: it holds no texts; compress the model again")
    return list(texts)


def cosine_difference(between: tuple[str, str], first: NDArray[Any], second: NDArray[Any]) -> Difference:
    """Compare (texts, hidden) embeddings of length 1: 1 − cosine, text by text.

    It is half the squared distance: 0 where both are equal. Products of float32 rows, whose length is 1 but for
    rounding, gave equal rows a distance of up to 6e-7, and hid unequal ones whose product is above 1.

    Raises:
        InputError: NaN or infinity.
    """
    distances = np.square(np.subtract(first, second, dtype=np.float64)).sum(1) / 2
    if not np.isfinite(distances).all():
        raise InputError(f"{' or '.join(between)} computes NaN or infinity; compress the model again")
    return measured(between, QUANTITY, len(distances), float(distances.max()), float(distances.mean()))
