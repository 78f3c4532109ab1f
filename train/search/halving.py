"""Successive halving: how far trials run before the worse of them are left behind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penjing.core.errors import ConfigError
from penjing.core.progress import plural


@dataclass(frozen=True)
class Rung:
    """`trials` runs reach `steps` steps."""

    steps: int
    trials: int


def rungs(trials: int, first: int, factor: int, steps: int, finalists: int = 1) -> list[Rung]:
    """The rungs of a search, the last of which is the whole run of the trials that are left.

    Args:
        trials: of the first rung. first: its steps. factor: of steps from rung to rung; one trial in so many goes on.
        steps: of a whole run. finalists: trials that go to the end at least.

    Raises:
        ConfigError: a whole run is no longer than the first rung.
    """
    if first >= steps:
        raise ConfigError(f"first = {plural(first, 'step')} is the whole run of {steps}; trials must be judged earlier")
    found = [Rung(first, trials)]
    while found[-1].steps < steps:
        last = found[-1]
        going = min(max(finalists, last.trials // factor), last.trials)
        # Those left that nothing leaves behind any more run to the end at once.
        far = last.steps * factor if going > finalists else steps
        # A rung just before the end would cost nearly the whole run and tell the same.
        far = steps if far * 1.5 > steps else far
        found.append(Rung(far, going))
    return found


def survivors(results: Mapping[int, float], count: int, *, lowest: bool) -> list[int]:
    """The `count` best of the trials, the best first; of equal ones that of the lower number. Failed ones, whose result
    is not finite, never go on."""
    sign = 1.0 if lowest else -1.0
    whole = [number for number, value in results.items() if math.isfinite(value)]
    return sorted(whole, key=lambda number: (sign * results[number], number))[:count]


def cost(plan: list[Rung]) -> int:
    """Steps of all trials together, each counted once since trials go on from where they are."""
    reached = 0
    total = 0
    for rung in plan:
        total += (rung.steps - reached) * rung.trials
        reached = rung.steps
    return total
