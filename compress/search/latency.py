"""Seconds of a whole network as a fitted sum of seconds of its layers, which are measured one by one.

A layer that is timed alone is neither fused with what follows it nor found in the caches that its neighbours leave, and
what is no layer (attention, norms, the runtime itself) is in no table. Both are fitted on some whole networks:

    seconds  ≈  c₀  +  Σ_k c_k × (what layers have of kind k)

Kinds are seconds alone, of layers and of attention, whose keys and values push weights out of the caches; the layers
that stay, whatever they are; and the numbers at borders, where one layer computes on integers and the next one does
not. No coefficient is negative. A factor for each number of bits, or each operator, predicts ResNets no better.
Whole networks take turns with the network as it is, and count by their ratios to it, for what disturbs a machine
disturbs both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.compress.search.draw import scattered
from penjing.compress.search.front import Table
from penjing.compress.search.recipe import GONE, Workload
from penjing.compress.search.space import Space
from penjing.core.config import key_of
from penjing.core.info import processor
from penjing.core.progress import Progress
from penjing.core.runtime.timing import interleaved
from penjing.core.work import Tasks

DRAWN = 16  # combinations that the sum is fitted to, beside the uniform ones
MOST_UNIFORM = 6
TURN = 0.02  # seconds that a network is called for in each round: single calls of 2 ms differ by 15 % on a busy machine
TIMING = 2  # raise it when what is timed changes, or how: searches then time anew
LAYERS, BORDERS = "of_its_time", "a_border"
ONCE = "once"  # what a network takes whatever its layers are
Choice = tuple[int, ...]


@dataclass(frozen=True)
class TimedLayer:
    """A part of the network, whose time depends on a few variables.

    Attributes:
        scope: variables by number, ascending.
        kinds: what it has of each kind, by the name of the kind's coefficient: one axis for each variable.
    """

    scope: tuple[int, ...]
    kinds: Mapping[str, NDArray[np.float64]]


class Clock(Protocol):
    """A runtime that runs what a search may make."""

    @property
    def now(self) -> Callable[[], float]:
        """What times are read from: `clock_of` the runtime's threads."""
        ...

    def parts(self, rounds: int, progress: Progress) -> tuple[list[TimedLayer], dict[str, Any]]:
        """Every layer with its measured seconds, and the table that they are from, JSON-ready: `entries` and what
        says where it was measured."""
        ...

    @property
    def whole(self) -> Callable[[], object]:
        """One call of the workload on the network as it is; made once, for everything takes turns with it."""
        ...

    def network(self, choice: Choice) -> Callable[[], object]:
        """The same on the network of a combination."""
        ...


def clock_of(threads: int) -> Callable[[], float]:
    """The clock for work on so many threads: on one, the processor time of the thread, which other programs on the same
    cores do not lengthen; on several, the time that passes."""
    return time.thread_time if threads == 1 else time.perf_counter


@dataclass(frozen=True)
class FittedLatency:
    """A fitted sum.

    Attributes:
        tables: its terms, for `pareto_front`.
        record: JSON-ready: `workload`, `entries`, `coefficients`, `fitted` [{choice, seconds, predicted}].
        start: seconds of the network as it is.
    """

    tables: tuple[Table, ...]
    record: dict[str, Any]
    start: float


def fit_latency(
    space: Space, clock: Clock, workload: Workload, seed: int, tasks: Tasks, progress: Progress
) -> FittedLatency:
    """Measure layers and some whole networks, and fit the sum; what `tasks` keeps is not measured again.

    Args:
        seed: of the combinations.
    """
    parts, table = _parts(space, clock, workload, tasks, progress)
    uniform = [space.uniform(*options) for options in _uniform_options(space)][-MOST_UNIFORM:]
    drawn = scattered(space.sizes, DRAWN, seed + 1)
    chosen = [each for each in dict.fromkeys([*uniform, *drawn]) if any(each)]
    progress.start("timing whole networks", len(chosen))
    ratios, start = [], []
    for choice in chosen:
        timed = time_network(clock, choice, workload, tasks)
        ratios.append(timed["ratio"])
        start.append(timed["start"])
        progress.advance()
    whole = median(start)
    fitted = np.array([space.start, *chosen])
    seconds = whole * np.array([1.0, *ratios])
    names, features = _features(parts, fitted)
    found = fit_nonnegative(features, seconds)
    predicted = features @ found
    coefficients = dict(zip(names, map(float, found), strict=True))
    tables = [Table((), np.array(coefficients[ONCE]), np.array(0.0))]
    for part in parts:
        cost = sum((coefficients[name] * values for name, values in part.kinds.items()), np.array(0.0))
        tables.append(Table(part.scope, cost, np.zeros_like(cost)))
    record = {
        "workload": workload.model_dump(),
        **table,
        "coefficients": coefficients,
        "fitted": [
            {"choice": list(map(int, choice)), "seconds": float(real), "predicted": float(guess)}
            for choice, real, guess in zip(fitted, seconds, predicted, strict=True)
        ],
    }
    return FittedLatency(tuple(tables), record, whole)


def time_network(clock: Clock, choice: Choice, workload: Workload, tasks: Tasks) -> dict[str, Any]:
    """`ratio`, seconds of a combination over those of the network as it is in the same rounds (the median), and
    `start`, the latter's."""

    def measure() -> dict[str, Any]:
        networks = [clock.whole, clock.network(choice)]
        start, own = interleaved(networks, rounds=workload.rounds, seconds=TURN, now=clock.now)
        return {"ratio": median(b / a for a, b in zip(start, own, strict=True)), "start": median(start)}

    return tasks.run(f"seconds_{_timed_as(workload, *choice)}", measure).result


def fit_nonnegative(features: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """(F,) coefficients, none negative, of the least squared relative error.

    Args:
        features: (N, F). seconds: (N,), positive.
    """
    weighted = features / seconds[:, None]
    best, least = np.zeros(features.shape[1]), np.inf
    present = features.any(axis=0)
    for used in product((False, True), repeat=features.shape[1]):  # a few features: every set of them
        if not any(used) or (~present & np.array(used)).any():
            continue
        places = np.flatnonzero(used)
        found = np.linalg.lstsq(weighted[:, places], np.ones(len(seconds)), rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(((weighted[:, places] @ found - 1) ** 2).sum())
        if error < least * (1 - 1e-12):
            best, least = np.zeros(features.shape[1]), error
            best[places] = found
    return best


def _parts(
    space: Space, clock: Clock, workload: Workload, tasks: Tasks, progress: Progress
) -> tuple[list[TimedLayer], dict[str, Any]]:
    def measure() -> dict[str, Any]:
        parts, table = clock.parts(workload.rounds, progress)
        stored = [
            {"scope": list(each.scope), "kinds": {name: values.tolist() for name, values in each.kinds.items()}}
            for each in parts
        ]
        return {"parts": stored, "table": table}

    found = tasks.run(f"kinds_{_timed_as(workload)}", measure).result
    parts = [
        TimedLayer(tuple(each["scope"]), {name: np.array(values, float) for name, values in each["kinds"].items()})
        for each in found["parts"]
    ]
    return parts, found["table"]


def _timed_as(workload: Workload, *choice: int) -> str:
    """A name for what is timed, how and where: a search that goes on with another processor times anew."""
    machine = processor()
    where = machine["name"], machine["cores"], torch.get_num_threads()
    return key_of(choice, workload.model_dump(), TIMING, where)[:20]


def _features(parts: Sequence[TimedLayer], choices: NDArray[np.integer]) -> tuple[list[str], NDArray[np.float64]]:
    """Names of the coefficients, and (N, their number) what they are multiplied with."""
    names = [ONCE, *dict.fromkeys(name for part in parts for name in part.kinds)]
    found = np.zeros((len(choices), len(names)))
    found[:, 0] = 1.0
    for part in parts:
        case = tuple(choices[:, each] for each in part.scope)
        for name, values in part.kinds.items():
            found[:, names.index(name)] += values[case]
    return names, found


def _uniform_options(space: Space) -> list[tuple[float, ...]]:
    """Shares, bits and windows of the uniform choices."""
    found: dict[str, set[float]] = {"share": set(), "bits": set(), "attention": set()}
    for one in space.variables:
        found[one.kind if one.kind in found else "share"] |= {*one.options}
    falling = [sorted(options - {GONE}, reverse=True) for options in found.values()]
    return list(product(*(options or [nothing] for options, nothing in zip(falling, (1.0, 32.0, np.inf), strict=True))))
