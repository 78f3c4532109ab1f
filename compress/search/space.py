"""The choices of a search, and what each combination costs: counted layer by layer exactly, or timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from penjing.compress.prune.graph import Group
from penjing.compress.search.front import Table
from penjing.compress.search.recipe import FLOATING, WHOLE, CostName


@dataclass(frozen=True)
class Variable:
    """One choice.

    Attributes:
        name: of the group of channels or of the layer, as a recipe writes it.
        kind: "layer" is a decoder's: shares of its MLP that stay, and 0 where the whole layer leaves. "attention" too:
            tokens that a query sees.
        options: shares of the units that stay, bits, or tokens; the first is the network as it is.
        group: of a width. units: for each option, those that leave; empty lists where nothing does.
    """

    name: str
    kind: Literal["width", "bits", "layer", "attention"]
    options: tuple[float, ...]
    group: Group | None = None
    units: tuple[tuple[int, ...], ...] = ()

    def nearest(self, option: float) -> int:
        """The place of the option that is `option`, or else of the next larger one."""
        return max(place for place, each in enumerate(self.options) if each >= option)


class OfLayer(NamedTuple):
    """The numbers of a decoder layer's variables, None where it has no such choice."""

    width: int | None
    bits: int | None
    attention: int | None

    @property
    def scope(self) -> tuple[int, ...]:
        """Those that it has, ascending."""
        return tuple(sorted(each for each in self if each is not None))


class Costly(Protocol):
    """A part of the network that a cost is counted of."""

    @property
    def scope(self) -> tuple[int, ...]:
        """The variables that its cost depends on, ascending."""
        ...

    def cost(self, variables: Sequence[Variable], name: CostName) -> NDArray[np.float64]:
        """What it costs, one axis for each variable of its scope."""
        ...


@dataclass(frozen=True)
class Weighted:
    """A convolution or linear layer, and which choices make it smaller.

    Attributes:
        macs: multiply-accumulates of one input; `weights`: how many. Both of the whole network.
        bits: the number of its variable, None where it stays floating.
        rows, columns: variable → (options,) shares of its outputs and inputs that leave.
    """

    name: str
    macs: float
    weights: int
    bits: int | None
    rows: dict[int, NDArray[np.float64]]
    columns: dict[int, NDArray[np.float64]]

    @property
    def scope(self) -> tuple[int, ...]:
        """The variables that its cost depends on, ascending."""
        found = {*self.rows, *self.columns} | ({self.bits} if self.bits is not None else set())
        return tuple(sorted(found))

    def inputs_left(self, variables: Sequence[Variable], scope: tuple[int, ...]) -> NDArray[np.float64]:
        """The share of its inputs that stays, one axis for each variable of `scope`."""
        return _left(self.columns, variables, scope)

    def cost(self, variables: Sequence[Variable], name: CostName) -> NDArray[np.float64]:
        """See `Costly`."""
        shape = [len(variables[each].options) for each in self.scope]
        rows, columns = (_left(gone, variables, self.scope) for gone in (self.rows, self.columns))
        bits = np.full(shape, float(FLOATING))
        if self.bits is not None:
            options = np.array(variables[self.bits].options, np.float64)
            bits = np.broadcast_to(_along(options, self.scope.index(self.bits), len(shape)), shape)
        whole = self.macs / FLOATING if name == "macs" else self.weights / 8
        return whole * bits * rows * columns


@dataclass(frozen=True)
class Counted:
    """A part whose costs are known for each case: one axis for each variable of `scope`."""

    scope: tuple[int, ...]
    costs: Mapping[CostName, NDArray[np.float64]]

    def cost(self, variables: Sequence[Variable], name: CostName) -> NDArray[np.float64]:
        """See `Costly`."""
        return self.costs[name]


@dataclass(frozen=True)
class Space:
    """All choices, and the layers that they are about.

    Attributes:
        beside: further pairs of variables whose changes may make each other worse, such as layers that follow each
            other.
        seconds: what `latency` is the sum of, once it was measured.
    """

    variables: tuple[Variable, ...]
    layers: tuple[Costly, ...]
    beside: tuple[tuple[int, int], ...] = ()
    seconds: tuple[Table, ...] = ()

    @property
    def sizes(self) -> list[int]:
        """How many options each variable has."""
        return [len(variable.options) for variable in self.variables]

    @property
    def start(self) -> tuple[int, ...]:
        """The network as it is."""
        return (0,) * len(self.variables)

    def pairs(self) -> list[tuple[int, int]]:
        """Neighbours: variables that one layer depends on, and those that stand beside each other."""
        return sorted({pair for layer in self.layers for pair in combinations(layer.scope, 2)} | {*self.beside})

    def timed(self, seconds: Sequence[Table]) -> Space:
        """The same space, whose `latency` is the sum of `seconds`."""
        return replace(self, seconds=tuple(seconds))

    def tables(self, cost: CostName) -> list[Table]:
        """What each layer costs, for `pareto_front`; layers that depend on nothing are one table of no variable."""
        if cost == "latency":
            assert self.seconds  # measured before anything asks
            return list(self.seconds)
        found = []
        for layer in self.layers:
            values = layer.cost(self.variables, cost)
            found.append(Table(layer.scope, values, np.zeros_like(values)))
        return found

    def costs(self, cost: CostName, choices: NDArray[np.integer]) -> NDArray[np.float64]:
        """Of combinations (N, variables), (N,)."""
        total = np.zeros(len(choices))
        for table in self.tables(cost):
            total += table.cost[tuple(choices[:, each] for each in table.scope)] if table.scope else float(table.cost)
        return total

    def uniform(self, share: float, bits: float, window: float = np.inf) -> tuple[int, ...]:
        """All groups at one share, all layers at one number of bits and one window, infinity being none: what a search
        has to beat."""
        wanted = {"bits": bits, "attention": window}
        return tuple(
            0 if (option := wanted.get(each.kind, share)) > each.options[0] else each.nearest(option)
            for each in self.variables
        )

    def ratios(self, choice: Sequence[int]) -> dict[str, float]:
        """What a prune step removes of each group, by name."""
        return {
            each.name: round(WHOLE - each.options[option], 9)
            for each, option in zip(self.variables, choice, strict=True)
            if each.kind == "width" and option
        }

    def floating(self, choice: Sequence[int]) -> list[str]:
        """The layers that stay floating, of those that could be INT8."""
        return [
            each.name
            for each, option in zip(self.variables, choice, strict=True)
            if each.kind == "bits" and each.options[option] == FLOATING
        ]


def _left(
    gone: Mapping[int, NDArray[np.float64]], variables: Sequence[Variable], scope: tuple[int, ...]
) -> NDArray[np.float64]:
    """What stays of 1 where each variable takes shares."""
    left = np.ones([len(variables[each].options) for each in scope])
    for each, shares in gone.items():
        left -= _along(shares, scope.index(each), len(scope))
    return left


def _along(values: NDArray[np.float64], axis: int, axes: int) -> NDArray[np.float64]:
    return values.reshape([-1 if each == axis else 1 for each in range(axes)])
