"""The choices of a search, and what each combination costs: counted layer by layer, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

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
        options: shares of the units that stay, or bits; the first is the network as it is.
        group: of a width. units: for each option, those that leave; empty lists where nothing does.
    """

    name: str
    kind: Literal["width", "bits"]
    options: tuple[float, ...]
    group: Group | None = None
    units: tuple[tuple[int, ...], ...] = ()

    def nearest(self, option: float) -> int:
        """The place of the option that is `option`, or else of the next larger one."""
        return max(place for place, each in enumerate(self.options) if each >= option)


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


@dataclass(frozen=True)
class Space:
    """All choices, and the layers that they are about."""

    variables: tuple[Variable, ...]
    layers: tuple[Weighted, ...]

    @property
    def sizes(self) -> list[int]:
        """How many options each variable has."""
        return [len(variable.options) for variable in self.variables]

    @property
    def start(self) -> tuple[int, ...]:
        """The network as it is."""
        return (0,) * len(self.variables)

    def pairs(self) -> list[tuple[int, int]]:
        """Neighbours: variables that one layer depends on."""
        return sorted({pair for layer in self.layers for pair in combinations(layer.scope, 2)})

    def tables(self, cost: CostName) -> list[Table]:
        """What each layer costs, for `pareto_front`; layers that depend on nothing are one table of no variable."""
        found = []
        for layer in self.layers:
            values = self._cost(layer, cost)
            found.append(Table(layer.scope, values, np.zeros_like(values)))
        return found

    def costs(self, cost: CostName, choices: NDArray[np.integer]) -> NDArray[np.float64]:
        """Of combinations (N, variables), (N,)."""
        total = np.zeros(len(choices))
        for table in self.tables(cost):
            total += table.cost[tuple(choices[:, each] for each in table.scope)] if table.scope else float(table.cost)
        return total

    def uniform(self, share: float, bits: float) -> tuple[int, ...]:
        """All groups at one share, all layers at one number of bits: what a search has to beat."""
        return tuple(each.nearest(share if each.kind == "width" else bits) for each in self.variables)

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

    def _cost(self, layer: Weighted, cost: CostName) -> NDArray[np.float64]:
        """One axis for each variable of the layer's scope."""
        scope = layer.scope
        shape = [len(self.variables[each].options) for each in scope]
        rows, columns = np.ones(shape), np.ones(shape)
        for stay, gone in ((rows, layer.rows), (columns, layer.columns)):
            for each, shares in gone.items():
                stay -= _along(shares, scope.index(each), len(shape))
        bits = np.full(shape, float(FLOATING))
        if layer.bits is not None:
            options = np.array(self.variables[layer.bits].options, np.float64)
            bits = np.broadcast_to(_along(options, scope.index(layer.bits), len(shape)), shape)
        whole = layer.macs / FLOATING if cost == "macs" else layer.weights / 8
        return whole * bits * rows * columns


def _along(values: NDArray[np.float64], axis: int, axes: int) -> NDArray[np.float64]:
    return values.reshape([-1 if each == axis else 1 for each in range(axes)])
