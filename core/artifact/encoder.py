"""Artifact folders of quantized text encoders, as `penjing compress` writes and `penjing serve` reads them.

config.json        architecture, as BERT's
tokenizer.json     and `sentence_bert_config.json`, which holds the longest text
model.onnx         explicit Q/DQ; "input_ids", "attention_mask" (batch, sequence) int64 → "embedding" (batch, hidden)
quantization.json  target, formats, options that ONNX Runtime needs for exact integers
report.json        cosines, retrieval, sizes, errors a layer; report.html shows them
parity.json        texts, what the fake-quantized model answers, how far ONNX Runtime is from it, the bound
penjing.json       kind "artifact", SHA-256 of each file above
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.classifier import MODEL_FILE, PARITY_FILE, QUANTIZATION_FILE, REPORT_FILE, Quantization
from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import Manifest, read_json_object, verify
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.runtime.onnx_runtime import open_graph
from penjing.core.text.text_tokenizer import TextTokenizer, TextTokens, encoder_config, is_encoder, pad

IDS, MASK, OUTPUT = "input_ids", "attention_mask", "embedding"
BATCH_TOKENS = 512  # with padding, in one run of `EncoderArtifact.embed`: what lies between layers stays in cache


class EncoderParity(Config):
    """Content of `parity.json`; cosines are between the fake-quantized model's embeddings and ONNX Runtime's."""

    schema_version: Literal[1] = 1
    texts: tuple[str, ...]
    embeddings: tuple[tuple[float, ...], ...]  # of the fake-quantized model
    smallest: dict[str, float]  # way of running → cosine
    mean: dict[str, float]
    bound: float  # of the mean, with the artifact's options


@dataclass(frozen=True)
class EncoderArtifact:
    """A verified artifact folder."""

    folder: Path
    config: EncoderConfig
    quantization: Quantization
    parity: EncoderParity
    report: dict[str, Any]
    tokenizer: TextTokenizer
    manifest: Manifest

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


def is_encoder_artifact(folder: Path) -> bool:
    """Whether `folder` looks like one; nothing is checked."""
    return (folder / MODEL_FILE).is_file() and (folder / QUANTIZATION_FILE).is_file() and is_encoder(folder)


def open_encoder_artifact(folder: Path) -> EncoderArtifact:
    """Open an artifact and check every hash.

    Raises:
        InputError: missing or damaged files, or a folder of another kind.
    """
    if not is_encoder_artifact(folder):
        raise InputError(
            f"{folder} is no artifact of a text encoder (it holds no {MODEL_FILE} and {QUANTIZATION_FILE}); "
            "'penjing compress recipes/minilm-int8.toml' makes one"
        )
    manifest = verify(folder)
    files = (MODEL_FILE, QUANTIZATION_FILE, PARITY_FILE, REPORT_FILE, "config.json", "tokenizer.json")
    if missing := [name for name in files if name not in manifest.sha256]:
        raise InputError(f"{folder / missing[0]} is not in the manifest; the folder was changed: make it again")
    config = encoder_config(folder)
    try:
        quantization = parse_config(Quantization, read_json_object(folder / QUANTIZATION_FILE), QUANTIZATION_FILE)
        parity = parse_config(EncoderParity, read_json_object(folder / PARITY_FILE), PARITY_FILE)
    except ConfigError as error:
        raise InputError(f"{folder}: {error}; the file is damaged: compress the model again") from None
    report = read_json_object(folder / REPORT_FILE)
    return EncoderArtifact(folder, config, quantization, parity, report, TextTokenizer(folder, config), manifest)
