"""What a combination of changes costs in quality, predicted from single changes and some fifty combinations.

With d the divergence of a changed network, and dᵢ that of its i-th change alone,

    d^p  ≈  Σᵢ aᵢ dᵢ^p  +  Σᵢⱼ bᵢⱼ (dᵢ dⱼ)^(p/2)

over all changes and over pairs of neighbours: a layer's bits, and the widths of the groups that it reads and makes.
(Independent errors add up in squares, which is p = 1 for a divergence; errors that point the same way add up in
amplitude, p = ½; smaller p where answers are saturated.) All aᵢ are pulled to one common factor and all bᵢⱼ to zero:
ridge regression. p and the strength of the ridge are those with which left-out combinations are ranked best. Since d^p
grows with d, the front of the right side, a sum over single choices and pairs, is the front of d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penjing.compress.search.front import Table

POWERS = (1.0, 0.7, 0.5, 0.35)
FEWEST = 3  # combinations, for a correlation of ranks to mean anything
RIDGES = (0.01, 0.1, 1.0, 10.0)


@dataclass(frozen=True)
class Prediction:
    """A fitted sum.

    Attributes:
        singles: of each variable (options,), what a change adds to d^p.
        pairs: pairs of variables → (options, options) of the same.
        power: p.
        ridge: its strength.
        rank: Spearman's correlation of combinations with what was predicted of each from the others.
        plain_rank: the same of plain sums of single changes.
    """

    singles: tuple[NDArray[np.float64], ...]
    pairs: dict[tuple[int, int], NDArray[np.float64]]
    power: float
    ridge: float
    rank: float
    plain_rank: float

    def tables(self) -> list[Table]:
        """Losses alone, for `pareto_front`."""
        found = [Table((place,), np.zeros_like(values), values) for place, values in enumerate(self.singles)]
        return found + [Table(pair, np.zeros_like(values), values) for pair, values in self.pairs.items()]

    def of(self, choices: NDArray[np.integer]) -> NDArray[np.float64]:
        """The divergences of combinations (N, variables), (N,) in nats or squared errors."""
        return np.maximum(self.total(choices), 0) ** (1 / self.power)

    def total(self, choices: NDArray[np.integer]) -> NDArray[np.float64]:
        """The same to the power p: the sum itself."""
        total = np.zeros(len(choices))
        for place, values in enumerate(self.singles):
            total += values[choices[:, place]]
        for (first, second), values in self.pairs.items():
            total += values[choices[:, first], choices[:, second]]
        return total

    def scaled(self, factors: Sequence[float]) -> Prediction:
        """With what each variable adds times a factor of its own, and what a pair adds times the mean of its two."""
        singles = tuple(factor * values for factor, values in zip(factors, self.singles, strict=True))
        pairs = {each: (factors[each[0]] + factors[each[1]]) / 2 * values for each, values in self.pairs.items()}
        return replace(self, singles=singles, pairs=pairs)


def fit(
    singles: Sequence[NDArray[np.float64]],
    pairs: Sequence[tuple[int, int]],
    choices: NDArray[np.integer],
    measured: NDArray[np.float64],
) -> Prediction:
    """Fit to combinations.

    Args:
        singles: of each variable (options,) what each option costs alone; 0 at the starting point.
        pairs: of neighbours, by number.
        choices: (N, variables) options of the combinations; of fewer than three nothing is learnt.
        measured: (N,) what they cost.
    """
    if len(measured) < FEWEST:
        plain = tuple(np.asarray(values, np.float64) for values in singles)
        return Prediction(plain, {}, 1.0, 0.0, 0.0, 0.0)
    best: tuple[float, float, float] | None = None
    for power in POWERS:
        design, target = _design(singles, pairs, choices, power), np.maximum(measured, 0) ** power
        for ridge in RIDGES:
            left_out = _left_out(design, target, ridge, len(singles))
            found = (spearman(left_out, measured), power, ridge)
            if best is None or found[0] > best[0]:
                best = found
    assert best is not None
    rank, power, ridge = best
    design = _design(singles, pairs, choices, power)
    weights = _solve(design, np.maximum(measured, 0) ** power, ridge, len(singles))
    factors, coupling = weights[0] + weights[1 : 1 + len(singles)], weights[1 + len(singles) :]
    plain = np.sum([values[choices[:, place]] for place, values in enumerate(singles)], axis=0)
    roots = [np.maximum(values, 0) ** (power / 2) for values in singles]
    return Prediction(
        tuple(factor * np.maximum(values, 0) ** power for factor, values in zip(factors, singles, strict=True)),
        {pair: b * np.outer(roots[pair[0]], roots[pair[1]]) for pair, b in zip(pairs, coupling, strict=True)},
        power,
        ridge,
        rank,
        spearman(plain, measured),
    )


def spearman(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The correlation of ranks, equal values having the mean of theirs; 0 where all of one side are equal."""
    first, second = _ranks(one), _ranks(other)
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale else 0.0


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(ends - (counts - 1) / 2, np.float64)[place]


def _design(
    singles: Sequence[NDArray[np.float64]],
    pairs: Sequence[tuple[int, int]],
    choices: NDArray[np.integer],
    power: float,
) -> NDArray[np.float64]:
    """(N, 1 + variables + pairs): the sum of all, each alone, each pair."""
    alone = np.stack([np.maximum(values, 0)[choices[:, place]] for place, values in enumerate(singles)], axis=1)
    own, roots = alone**power, alone ** (power / 2)
    both = [roots[:, first] * roots[:, second] for first, second in pairs]
    return np.concatenate([own.sum(1, keepdims=True), own, *(each[:, None] for each in both)], axis=1)


def _solve(
    design: NDArray[np.float64], target: NDArray[np.float64], ridge: float, variables: int
) -> NDArray[np.float64]:
    scale = float(np.mean(design[:, 1 : 1 + variables] ** 2)) or 1.0
    penalty = np.full(design.shape[1], ridge * scale * len(design))
    penalty[0] = 1e-9 * scale * len(design)  # the common factor is free
    return np.asarray(np.linalg.solve(design.T @ design + np.diag(penalty), design.T @ target), np.float64)


def _left_out(
    design: NDArray[np.float64], target: NDArray[np.float64], ridge: float, variables: int
) -> NDArray[np.float64]:
    """What is predicted of each row from the others."""
    rows = np.arange(len(design))
    return np.array([design[row] @ _solve(design[rows != row], target[rows != row], ridge, variables) for row in rows])
