"""Exact choice: one option of each variable, where costs and losses are sums over tables of a few variables each.

One variable after the other is eliminated: for every choice of those that share a table with it, the Pareto fronts of
its tables are added up, and those of its options merged. What another combination beats in both cost and loss can never
be part of a best whole, so nothing is lost. With tables of one variable each this is the multiple-choice knapsack,
whose fronts are merged choice by choice; shared tables are what makes a layer's cost depend on the width before it.
(Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972, with fronts in place of numbers.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from penjing.core.errors import ConfigError

MOST_CASES = 30_000  # combinations of the neighbours of one variable, each of which has a front
MOST_POINTS = 2048  # of a front, before it is thinned


@dataclass(frozen=True)
class Table:
    """Costs and losses of every combination of a few variables.

    Attributes:
        scope: variables by number, ascending.
        cost, loss: one axis a variable of `scope`, as long as it has options; float64.
    """

    scope: tuple[int, ...]
    cost: NDArray[np.float64]
    loss: NDArray[np.float64]


@dataclass(frozen=True)
class Front:
    """Combinations that no other one equals or beats in both, cheapest first.

    Attributes:
        cost, loss: (points,) float64.
        choices: (points, variables) int16, the option of each variable.
        exact: whether nothing was thinned on the way; then no combination at all beats one of these.
    """

    cost: NDArray[np.float64]
    loss: NDArray[np.float64]
    choices: NDArray[np.int16]
    exact: bool = True

    def __len__(self) -> int:
        return len(self.cost)


def pareto_front(sizes: Sequence[int], tables: Iterable[Table], most_points: int = MOST_POINTS) -> Front:
    """The front of all combinations.

    Args:
        sizes: options of each variable.
        most_points: longer fronts on the way keep the best of each of so many equal steps of cost.

    Raises:
        ConfigError: too many variables share tables with each other.
    """
    count = len(sizes)
    held = [_opened(table, count) for table in tables]
    exact = True
    left = set(range(count))
    while left:
        chosen = min(left, key=lambda each: (_cases(_joined(held, each), sizes), each))
        scope = _joined(held, chosen)
        if _cases(scope, sizes) > MOST_CASES:
            raise ConfigError(
                f"{len(scope) + 1} choices of the space depend on each other at once, {_cases(scope, sizes):,} "
                "combinations: too many for an exact choice; give fewer widths, or protect groups in the prune step"
            )
        own = [each for each in held if chosen in each[0]]
        held = [each for each in held if chosen not in each[0]]
        fronts: dict[tuple[int, ...], Front] = {}
        for case in product(*(range(sizes[each]) for each in scope)):
            merged = _eliminated(own, dict(zip(scope, case, strict=True)), chosen, sizes[chosen], count)
            fronts[case] = _thinned(merged, most_points)
            exact &= fronts[case].exact
        held.append((scope, fronts))
        left.remove(chosen)
    result = _point(0.0, 0.0, count)
    for _, fronts in held:
        result = _thinned(_added(result, fronts[()]), most_points)
        exact &= result.exact
    return Front(result.cost, result.loss, result.choices, exact)


def best_of(cost: NDArray[np.float64], loss: NDArray[np.float64]) -> NDArray[np.int64]:
    """The places of the front of some points, cheapest first; of equal ones the first."""
    order = np.lexsort((loss, cost))
    best = np.minimum.accumulate(np.concatenate([[np.inf], loss[order]]))[:-1]
    return order[loss[order] < best]


def evenly_spread(cost: NDArray[np.float64], count: int) -> list[int]:
    """At most `count` places of ascending costs, at ratios as equal as can be; the cheapest and the dearest are in."""
    if len(cost) <= count:
        return list(range(len(cost)))
    logs = np.log(cost)
    wanted = np.linspace(logs[0], logs[-1], count)
    return sorted({int(np.abs(logs - each).argmin()) for each in wanted})


_Held = tuple[tuple[int, ...], dict[tuple[int, ...], Front]]


def _opened(table: Table, count: int) -> _Held:
    fronts: dict[tuple[int, ...], Front] = {}
    for case in product(*map(range, table.cost.shape)):
        fronts[case] = _point(float(table.cost[case]), float(table.loss[case]), count)
    return table.scope, fronts


def _point(cost: float, loss: float, count: int) -> Front:
    return Front(np.array([cost]), np.array([loss]), np.full((1, count), -1, np.int16))


def _joined(held: Sequence[_Held], variable: int) -> tuple[int, ...]:
    """The others in the tables of a variable."""
    others = {each for scope, _ in held if variable in scope for each in scope}
    return tuple(sorted(others - {variable}))


def _cases(scope: Sequence[int], sizes: Sequence[int]) -> int:
    return prod(sizes[each] for each in scope)


def _eliminated(own: Sequence[_Held], case: dict[int, int], variable: int, options: int, count: int) -> Front:
    """The merged front of all options of a variable, the others being `case`."""
    parts: list[Front] = []
    for option in range(options):
        values = case | {variable: option}
        front = _point(0.0, 0.0, count)
        for scope, fronts in own:
            front = _added(front, fronts[tuple(values[each] for each in scope)])
        choices = front.choices.copy()
        choices[:, variable] = option
        parts.append(Front(front.cost, front.loss, choices))
    return _best(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("cost", "loss", "choices")))


def _added(one: Front, other: Front) -> Front:
    """Every sum of a point of each; what is set in neither stays -1."""
    cost = (one.cost[:, None] + other.cost).ravel()
    loss = (one.loss[:, None] + other.loss).ravel()
    kept = best_of(cost, loss)
    first, second = np.divmod(kept, len(other))
    return Front(cost[kept], loss[kept], np.maximum(one.choices[first], other.choices[second]))


def _best(cost: NDArray[np.float64], loss: NDArray[np.float64], choices: NDArray[np.int16]) -> Front:
    kept = best_of(cost, loss)
    return Front(cost[kept], loss[kept], choices[kept])


def _thinned(front: Front, most: int) -> Front:
    """At most `most` points: of each step of cost the one that loses least, which is its last."""
    if len(front) <= most:
        return front
    width = (front.cost[-1] - front.cost[0]) / (most - 1)
    steps = ((front.cost - front.cost[0]) / width).astype(np.int64)
    kept = np.append(steps[1:] != steps[:-1], True)
    kept[0] = True
    return Front(front.cost[kept], front.loss[kept], front.choices[kept], exact=False)
