"""Units: the smallest sets of slices that a network can lose together, kept as a union-find over integers.

Every index of every dimension of every weight starts as a unit of its own; operations that need two slices to stay or
go together unite them. Unit 0 is `FROZEN`: what is united with it stays.
"""

from __future__ import annotations

import numpy as np

FROZEN = 0


class Units:
    """A union-find whose roots are the smallest members, so that `FROZEN` stays the root of what it joins."""

    def __init__(self) -> None:
        self._parent = np.zeros(1, dtype=np.int64)

    def new(self, count: int) -> np.ndarray:
        """`count` fresh units, (count,) int64."""
        first = self._parent.size
        fresh = np.arange(first, first + count)
        self._parent = np.concatenate([self._parent, fresh])
        return fresh

    def find(self, units: np.ndarray) -> np.ndarray:
        """The representative of each unit; the shape stays."""
        roots = self._parent[units]
        while True:
            above = self._parent[roots]
            if np.array_equal(above, roots):
                break
            roots = above
        self._parent[units] = roots
        return roots

    def unite(self, left: np.ndarray, right: np.ndarray) -> None:
        """Unite element by element; the shapes broadcast."""
        left, right = np.broadcast_arrays(self.find(left), self.find(right))
        different = left != right
        if not different.any():
            return
        pairs = np.unique(np.stack([left[different], right[different]], axis=1), axis=0)
        for first, second in pairs.tolist():
            first, second = self._root(first), self._root(second)
            if first != second:
                self._parent[max(first, second)] = min(first, second)

    def freeze(self, units: np.ndarray) -> None:
        """Keep `units` in the network."""
        self._parent[self.find(units)] = FROZEN  # the smallest of all, so that it is a root

    def _root(self, unit: int) -> int:
        parent = self._parent
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = int(parent[unit])
        return unit
