"""Rows of images in a step: ids beyond the vocabulary point into a table of the rows that the step needs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.serve.engine.sequence import Sequence


class SeenRows:
    """The side table of one step, and the ids that point into it."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._parts: list[torch.Tensor] = []
        self._count = 0

    def clear(self) -> None:
        """Forget the last step."""
        self._parts, self._count = [], 0

    def fill(self, sequence: Sequence, start: int, ids: NDArray[np.int32]) -> None:
        """Write into `ids`, those of the tokens of `sequence` from `start` on, where rows of its images stand."""
        end = start + len(ids)
        for image in sequence.images:
            first, last = max(start, image.start), min(end, image.end)
            if first < last:
                here = self._vocab_size + self._count
                ids[first - start : last - start] = np.arange(here, here + last - first)
                self._parts.append(image.rows[first - image.start : last - image.start])
                self._count += last - first

    def rows(self) -> torch.Tensor | None:
        """(X, hidden) float32 of the step; None where no token of it is an image's."""
        if not self._parts:
            return None
        return self._parts[0] if len(self._parts) == 1 else torch.cat(self._parts)
