"""The parity record of a text encoder: texts, and the embeddings that they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penjing.compress.parity.base import OnnxParity
from penjing.compress.samples.retrieval import embed_with
from penjing.core.artifact.onnx import recorded
from penjing.core.artifact.onnx_encoder import (
    QUANTITY,
    EncoderArtifact,
    cosine_difference,
    embed_texts,
    open_encoder_artifact,
    open_encoder_session,
    recorded_texts,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Difference
from penjing.core.graph.network import Network
from penjing.core.progress import Silent
from penjing.core.text.text_tokenizer import TextTokenizer


class EncoderParity(OnnxParity[EncoderArtifact, NDArray[np.float32]]):
    """Texts → (texts, hidden) embeddings of length 1."""

    family = "encoder"
    quantity = QUANTITY
    statistic = "mean"
    hint = "raise parity_bound if that is acceptable"
    keeps_all = False  # the embeddings of one implementation already take half a megabyte

    def __init__(self, texts: list[str], tokenizer: TextTokenizer) -> None:
        self._texts = texts
        self._tokenizer = tokenizer

    @staticmethod
    def open(folder: Path) -> EncoderArtifact:
        return open_encoder_artifact(folder)

    @classmethod
    def of(cls, artifact: EncoderArtifact) -> tuple[Self, NDArray[np.float32]]:
        wanted = recorded(artifact.parity, FAKE_QUANTIZED).astype(np.float32)
        return cls(recorded_texts(artifact.parity), artifact.tokenizer), wanted

    def embedded(self, network: Network) -> NDArray[np.float32]:
        """What `network`, fake-quantized, answers."""
        return embed_with(lambda *inputs: network(*inputs)[0], self._tokenizer, self._texts, Silent())

    def inputs(self) -> dict[str, Any]:
        return {"texts": self._texts}

    def run(self, file: Path, options: dict[str, str], optimise: bool) -> NDArray[np.float32]:
        session = open_encoder_session(file, options, threads=1, optimise=optimise)
        return embed_texts(session, self._tokenizer, self._texts)

    def stored(self, answers: NDArray[np.float32]) -> list[Any]:
        return answers.tolist()

    def differences(
        self, between: tuple[str, str], first: NDArray[np.float32], second: NDArray[np.float32]
    ) -> tuple[Difference, ...]:
        return (cosine_difference(between, first, second),)
