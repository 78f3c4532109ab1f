"""How well a text fits its image: the cosine of their vectors by two towers, CLIP's score without its scale
(https://arxiv.org/abs/2104.08718)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penjing.core.artifact.towers import load_embedder

_SHARES = (5, 50, 95)  # of the images lie below what the report names so


class Alignment:
    """Judges by the checkpoint in `folder`, such as an imported CLIP or what `recipes/clip-emoji.toml` trains.

    Args:
        max_pixels: of an image at most.
        least: images below it are dropped; None keeps all.

    Raises:
        InputError: `folder` holds no two towers.
    """

    def __init__(self, folder: Path, max_pixels: int, least: float | None = None) -> None:
        self._embedder, self._most, self.least = load_embedder(folder), max_pixels, least
        self._scores: list[float] = []

    def score(self, image: bytes, text: str) -> float:
        """Of a JPEG or PNG and a text that is not empty, from -1 to 1.

        Raises:
            InputError: the image cannot be read at the size of the towers.
        """
        seen, read = self._embedder.of_file(image, self._most), self._embedder.of_texts([text])[0]
        score = float(np.dot(seen.result(), read.result()))
        self._scores.append(score)
        return score

    def summary(self) -> dict[str, float]:
        """What shares of the scores lie below; nothing where there was none."""
        if not self._scores:
            return {}
        found = np.percentile(self._scores, _SHARES)
        return {f"alignment, {share} % below": round(float(at), 4) for share, at in zip(_SHARES, found, strict=True)}
