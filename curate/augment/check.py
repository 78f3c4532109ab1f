"""Whether a changed sentence still says what it said."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penjing.curate.augment.sentences import marks_of, negations_of

_SHORTER, _LONGER = 0.6, 1.6


class Checker:
    """Judges sentences.

    Args:
        encoder: maps a text to its (features,) of length 1.
        language: maps a text to its ISO code, "" where there are no letters.
        least: the cosine that a sentence must keep.
    """

    def __init__(
        self, encoder: Callable[[str], NDArray[np.float32]], language: Callable[[str], str], least: float
    ) -> None:
        self._encoder, self.language, self._least = encoder, language, least

    def wrong(self, sentence: str, made: str) -> str:
        """What `made` of `sentence` breaks; "" where nothing. What costs least is looked at first."""
        if made == sentence:
            return "unchanged"
        if not _SHORTER * len(sentence) <= len(made) <= _LONGER * len(sentence):
            return "length"
        if marks_of(made) != marks_of(sentence):
            return "names and numbers"
        if negations_of(made) != negations_of(sentence):
            return "negation"
        before = self.language(sentence)
        if before and self.language(made) != before:
            return "language"
        if float(self._encoder(sentence) @ self._encoder(made)) < self._least:
            return "meaning"
        return ""
