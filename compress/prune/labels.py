"""Labels: which units each element of a tensor belongs to, through reshapes, broadcasts and contractions.

A tensor's label is a tuple of factors. A factor is an int64 array of units with the tensor's number of dimensions, each
of the tensor's size or 1 (then the units do not depend on that dimension). An element goes when any factor's unit does.
An activation (N, C, H, W) has one factor (1, C, 1, 1); a weight (O, I) has (O, 1) and (1, I).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from penjing.compress.prune.units import FROZEN, Units

Factor = np.ndarray
Label = tuple[Factor, ...]
NONE: Label = ()


def along(units: np.ndarray, dim: int, num_dims: int) -> Factor:
    """The factor whose units (n,) lie along `dim`."""
    shape = [1] * num_dims
    shape[dim] = units.size
    return units.reshape(shape)


def varies(factor: Factor, dim: int) -> bool:
    """Whether the units depend on the index of `dim`."""
    return factor.shape[dim] > 1


class Labeler:
    """Operations on labels that unite units where they must.

    Attributes:
        rewrites: whether sizes that stand in the operations themselves follow when units leave. Otherwise they are
            fixed, and units that they count are pinned.
    """

    def __init__(self, rewrites: bool = False) -> None:
        self.rewrites = rewrites
        self.units = Units()
        self._grids: list[Factor] = []

    def fresh(self, shape: Sequence[int]) -> Label:
        """The label of a weight: new units along each dimension of two or more."""
        return tuple(along(self.units.new(size), dim, len(shape)) for dim, size in enumerate(shape) if size > 1)

    def freeze(self, label: Label) -> None:
        """Keep every element."""
        for factor in label:
            self.units.freeze(factor)

    def tidy(self, factors: Sequence[Factor]) -> Label:
        """Representatives, without dimensions that do not matter, without factors that hold nothing removable."""
        kept: list[Factor] = []
        for factor in factors:
            factor = self.units.find(factor)
            for dim in range(factor.ndim):
                first = factor.take([0], dim)
                if varies(factor, dim) and (factor == first).all():
                    factor = first
            if factor.size > 1 and (factor != FROZEN).any() and not any(np.array_equal(factor, k) for k in kept):
                kept.append(factor)
        return tuple(kept)

    def pin(self, factor: Factor, dims: Sequence[int]) -> Factor:
        """Unite along `dims`, whose indices cannot be removed one by one; frozen when nothing else varies."""
        for dim in dims:
            if varies(factor, dim):
                first = factor.take([0], dim)
                self.units.unite(factor, first)
                factor = first
        if factor.size == 1:
            self.units.freeze(factor)
        return self.units.find(factor)

    def pinned(self, label: Label, dims: Sequence[int]) -> Label:
        """`label` with each factor pinned along `dims`."""
        return self.tidy([self.pin(factor, dims) for factor in label])

    def broadcast(self, labels: Sequence[Label], shapes: Sequence[Sequence[int]]) -> Label:
        """The label of an element-wise result: aligned elements share their fate.

        Where a tensor has a dimension's full size and no units along it (an input, a constant), the others' units are
        pinned along it. A grid that meets units along some of its dimensions keeps its outermost removable: the heads
        of (heads, features), whether it meets a scale of each head or a norm over the features of all.
        """
        num_dims = max(map(len, shapes))
        sizes = np.broadcast_shapes(*map(tuple, shapes))
        padded = [(1,) * (num_dims - len(shape)) + tuple(shape) for shape in shapes]
        current = [
            [factor.reshape((1,) * (num_dims - factor.ndim) + factor.shape) for factor in label] for label in labels
        ]
        for dim in range(num_dims):
            if sizes[dim] == 1:
                continue
            full = [index for index, shape in enumerate(padded) if shape[dim] == sizes[dim]]
            holders = [[factor for factor in current[index] if varies(factor, dim)] for index in full]
            spans = {_span(factor) for factors in holders for factor in factors}
            common = set.intersection(*map(set, spans)) if spans else set()
            if all(holders) and all(span[0] in common for span in spans if len(span) > 1):
                united: Factor | None = None
                for index in full:
                    for place, factor in enumerate(current[index]):
                        if varies(factor, dim):
                            factor = self.pin(factor, [d for d in _span(factor) if d not in common])
                            if united is not None:
                                self.units.unite(united, factor)
                            united, current[index][place] = factor, factor
            else:
                for index in full:
                    current[index] = [
                        self.pin(factor, [dim]) if varies(factor, dim) else factor for factor in current[index]
                    ]
            current = [list(self.tidy(factors)) for factors in current]
        return self.tidy([factor for factors in current for factor in factors])

    def contract(self, labels: Sequence[Label], shapes: Sequence[Sequence[int]], dims: Sequence[int]) -> Label:
        """The label of a product summed over `dims` of the common, broadcast index space; `dims` have size 1 after."""
        return self.reduce(self.broadcast(labels, shapes), dims)

    def reduce(self, label: Label, dims: Sequence[int]) -> Label:
        """Sum over `dims`: units that vary along them alone end here, those of a grid are united along them."""
        kept = []
        for factor in label:
            if any(varies(factor, dim) for dim in dims):
                if not any(varies(factor, dim) for dim in range(factor.ndim) if dim not in dims):
                    continue
                factor = self.pin(factor, dims)
            kept.append(factor)
        return self.tidy(kept)

    def reshape(self, label: Label, old: Sequence[int], new: Sequence[int]) -> Label:
        """The label after `x.reshape(new)`."""
        chunks = _chunks(list(old), list(new))
        result = []
        for factor in label:
            shape: list[int] = []
            full: list[int] = []
            for sources, targets in chunks:
                if any(varies(factor, dim) for dim in sources):
                    full += [old[dim] for dim in sources]
                    shape += [new[dim] for dim in targets]
                else:
                    full += [1] * len(sources)
                    shape += [1] * len(targets)
            (tidied,) = self.tidy([np.broadcast_to(factor, full).reshape(shape)]) or (None,)
            if tidied is None:
                continue
            if sum(size > 1 for size in tidied.shape) > 1:
                self._grids.append(tidied)
            result.append(tidied)
        return self.tidy(result)

    def settle(self) -> None:
        """Unite what reshapes leave open: a dimension that is seen as a grid loses whole rows, or else whole columns.

        Rows, where the network itself made each row one unit (the features of a head). Otherwise columns: the same
        index in every row (a channel shuffle).
        """
        changed = True
        while changed:
            changed = False
            for grid in self._grids:
                roots = self.units.find(grid)
                wide = [dim for dim in range(roots.ndim) if varies(roots, dim)]
                if any(all((roots == roots.take([0], other)).all() for other in wide if other != dim) for dim in wide):
                    continue
                for dim in wide[:-1]:
                    self.units.unite(roots, roots.take([0], dim))
                changed = True


def split_with(dim: int, old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The dimensions of `new` that one dimension of `old` was split into, `dim` among them."""
    return next(targets for _, targets in _chunks(list(old), list(new)) if dim in targets)


def _span(factor: Factor) -> tuple[int, ...]:
    return tuple(dim for dim in range(factor.ndim) if varies(factor, dim))


def _chunks(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions with equal products: the parts of a reshape that do not depend on each other."""
    chunks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        sources, targets = [], []
        if i < len(old):
            sources.append(i)
            i += 1
        if j < len(new):
            targets.append(j)
            j += 1
        while prod(old[k] for k in sources) != prod(new[k] for k in targets):
            if prod(old[k] for k in sources) < prod(new[k] for k in targets):
                sources.append(i)
                i += 1
            else:
                targets.append(j)
                j += 1
        chunks.append((sources, targets))
    return chunks
