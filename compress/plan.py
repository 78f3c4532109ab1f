"""The steps of a recipe written out: rounds as prunes of their own, cut into the stretches that the guard judges."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penjing.compress.recipe import Guard
from penjing.compress.steps.base import Step
from penjing.compress.steps.prune import Prune


@dataclass(frozen=True)
class Planned:
    """One step as it will be done: `number` counts from 1 after rounds are written out; `place` is the recipe's."""

    number: int
    place: int
    step: Step
    guarded: bool

    @property
    def name(self) -> str:
        """Such as "02-distill"."""
        return f"{self.number:02d}-{self.step.kind}"


def step_key(place: int) -> str:
    """What names the files of the recipe's step `place` among the hashes of a run."""
    return f"steps.{place}"


def plan(steps: tuple[Step, ...]) -> list[Planned]:
    """The steps with rounds written out.

    A prune of ratio r in n rounds becomes n prunes of 1 - (1 - r)^(1/n), which together leave 1 - r.
    """
    flat: list[tuple[int, Step]] = []
    place = 0
    while place < len(steps):
        step = steps[place]
        if isinstance(step, Prune) and step.rounds > 1 and step.ratio is not None:
            length = _pair(steps, place)
            share = 1 - (1 - step.ratio) ** (1 / step.rounds)
            once = step.model_copy(update={"rounds": 1, "ratio": round(share, 9)})
            flat += [
                (place + i, each)
                for _ in range(step.rounds)
                for i, each in enumerate([once, *steps[place + 1 : place + length]])
            ]
            place += length
        else:
            flat.append((place, step))
            place += 1
    last = len(flat)
    return [
        Planned(number, where, step, step.guard if step.guard is not None else step.heals or number == last)
        for number, (where, step) in enumerate(flat, 1)
    ]


def _pair(steps: tuple[Step, ...], place: int) -> int:
    """How many steps repeat with the prune at `place`: up to the first that heals; alone if a prune comes before."""
    for length, step in enumerate(steps[place + 1 :], 2):
        if step.heals:
            return length
        if isinstance(step, Prune):
            break
    return 1


def stretches(planned: list[Planned]) -> list[list[Planned]]:
    """The plan cut after each guarded step; what follows the last one stands by itself."""
    result: list[list[Planned]] = [[]]
    for each in planned:
        result[-1].append(each)
        if each.guarded:
            result.append([])
    return [stretch for stretch in result if stretch]


def milder(stretch: list[Planned], guard: Guard) -> list[Planned] | None:
    """The stretch with weaker prunes; None where none can be weaker."""
    changed = [replace(each, step=each.step.milder(guard.milder, guard.floor)) for each in stretch]
    return changed if changed != stretch else None
