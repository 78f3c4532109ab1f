"""A stand-in for a constraint whose allowed tokens are given."""

from __future__ import annotations

import numpy as np


class Mask:
    """Allows the tokens whose bits are set in `words`, which are shown behind `fill` alone when asked so."""

    def __init__(self, words: np.ndarray, hidden: bool = False) -> None:
        self._words = words
        self.mask = np.zeros_like(words) if hidden else words
        self.num_filled = 0

    def fill(self) -> None:
        self.mask[:] = self._words
        self.num_filled += 1

    def num_allowed(self, token_ids: list[int]) -> int:
        (token_id,) = token_ids
        return int(self._words[token_id // 32] >> (token_id % 32) & 1)
