"""A recipe with `[[steps]]`: what is pruned, trained and checked, in which order.

    model = "build/resnet-fashion"
    output = "build/resnet-fashion-pruned"
    [guard]
    accuracy_points = 1.0
    [[steps]]
    kind = "prune"
    ratio = 0.3
    [[steps]]
    kind = "distill"

Steps come in any order and number. A step's result is *guarded* if the network must be within its budget there: after
each distill and finetune and after the last step, unless the step says `guard = true` or `false`. Steps up to and
with a guarded one form a stretch, which is kept, repeated milder, or given up as a whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from penjing.compress.measure.cost import MeasureSettings
from penjing.compress.measure.data import Calibrate
from penjing.compress.measure.evaluate import EvaluateSettings
from penjing.compress.steps.distill import DistillStep
from penjing.compress.steps.prune import PruneStep
from penjing.compress.steps.quantize import QuantizeStep
from penjing.compress.steps.quantize_decoder import DecoderInt8
from penjing.compress.steps.sparsify import SparsifyStep
from penjing.core.config import Config, parse_config, read_recipe
from penjing.core.errors import ConfigError


class Prune(PruneStep):
    """Removal of channels, heads or layers.

    `rounds`: do it in so many equal shares of what stays, each followed by the steps up to the next distill or
    finetune, so that the network heals in between. `batch_norm`: estimate the norms' statistics anew afterwards.
    """

    rounds: int = Field(default=1, ge=1, le=100)
    batch_norm: bool = True
    guard: bool | None = None


class Sparsify(SparsifyStep):
    """Training that drives whole groups to zero, for a prune after it."""

    guard: bool | None = None


class Distill(DistillStep):
    """Training with a teacher, or without one (finetune); the teacher is the model that the run begins with, unless
    another is named."""

    teacher: Path | None = None
    guard: bool | None = None


class Quantize(QuantizeStep):
    """INT8, the last step: calibrated, or trained if `steps` says so.

    A decoder is told by `int8` (and learns from the model that the run begins with, unless a teacher is named); a
    classifier by all the rest.
    """

    int8: DecoderInt8 | None = None
    guard: bool | None = None


Step = Prune | Sparsify | Distill | Quantize
HEALING = ("distill", "finetune")


class Guard(Config):
    """How much quality may go, and what happens when more does.

    `accuracy_points`, `perplexity_ratio`: the most that a guarded result may lose `against` the model that the run
    begins with (so that the losses of several stretches cannot add up), or the last guarded result before it.
    A stretch that loses more is rolled back and repeated with weaker prunes, at most `retries` times: `milder` times
    the ratio, or the part that a target removes, but not below `floor`; of layers that many, the first of a list. A
    target in absolute numbers stays. Then the run stops, or leaves the stretch out and goes on (`otherwise`).
    """

    accuracy_points: float = Field(default=1.0, ge=0)
    perplexity_ratio: float = Field(default=1.1, ge=1)
    against: Literal["model", "previous"] = "model"
    retries: int = Field(default=2, ge=0, le=20)
    milder: float = Field(default=0.5, gt=0, lt=1)
    floor: float = Field(default=0.05, gt=0, lt=1)
    otherwise: Literal["stop", "skip"] = "stop"


class FlowRecipe(Config):
    """A whole run."""

    model: Path
    output: Path
    calibrate: Calibrate = Calibrate()
    evaluate: EvaluateSettings = EvaluateSettings()
    measure: MeasureSettings = MeasureSettings()
    guard: Guard = Guard()
    steps: tuple[Annotated[Step, Field(discriminator="kind")], ...]

    def settings(self) -> dict[str, Any]:
        """Everything that decides the result: all but where it is read from and written to."""
        return self.model_dump(mode="json", exclude={"model", "output"})


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


def load_flow(path: Path, overrides: list[str] | None = None) -> FlowRecipe:
    """Read a recipe with steps.

    Raises:
        ConfigError: unreadable, a wrong key or value, or steps in an order that makes no sense.
    """
    recipe = parse_config(FlowRecipe, read_recipe(path, overrides), str(path))
    try:
        check_order(recipe.steps)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return recipe


def check_order(steps: tuple[Step, ...]) -> None:
    """Refuse steps that cannot do what they are for.

    Raises:
        ConfigError: no steps; a distill whose student is its teacher; a finetune with one; a sparsify that no prune
            follows; rounds of a prune that has no ratio.
    """
    if not steps:
        raise ConfigError("steps is empty; add a [[steps]] section with kind = 'prune'")
    for place, step in enumerate(steps):
        before = steps[:place]
        if step.kind == "distill" and _own_teacher(step) is None and not before:
            raise ConfigError(
                f"steps.{place}: nothing was changed before this distill, so that student and teacher are the same "
                "network; put it after a prune, name another teacher, or use kind = 'finetune'"
            )
        if step.kind == "finetune" and _own_teacher(step) is not None:
            raise ConfigError(f"steps.{place}: finetune has no teacher; leave it out, or write kind = 'distill'")
        if step.kind == "quantize" and place + 1 < len(steps):
            raise ConfigError(f"steps.{place}: nothing can follow a quantize, which makes an artifact; put it last")
        if step.kind == "sparsify" and not any(later.kind == "prune" for later in steps[place + 1 :]):
            raise ConfigError(
                f"steps.{place}: no prune follows this sparsify, so that nothing removes what it drives to zero; "
                "put a prune after it"
            )
        if isinstance(step, Prune) and step.rounds > 1 and (step.ratio is None or step.layers is not None):
            raise ConfigError(
                f"steps.{place}.rounds={step.rounds} divides a ratio of units: give ratio, no target and no layers"
            )


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
        Planned(number, where, step, step.guard if step.guard is not None else step.kind in HEALING or number == last)
        for number, (where, step) in enumerate(flat, 1)
    ]


def _pair(steps: tuple[Step, ...], place: int) -> int:
    """How many steps repeat with the prune at `place`: up to the first that heals; alone if a prune comes before."""
    for length, step in enumerate(steps[place + 1 :], 2):
        if step.kind in HEALING:
            return length
        if step.kind == "prune":
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
    changed = [_milder_step(each, guard) for each in stretch]
    return changed if changed != stretch else None


def _milder_step(planned: Planned, guard: Guard) -> Planned:
    step = planned.step
    if not isinstance(step, Prune):
        return planned
    changed: dict[str, Any] = {}
    if step.ratio is not None and step.ratio > guard.floor:
        changed["ratio"] = max(guard.floor, round(step.ratio * guard.milder, 9))
    if step.target is not None:
        name, value = step.target.quantity()
        if 1 - value > guard.floor:  # a part of what there is; an absolute number stays
            stays = 1 - max(guard.floor, (1 - value) * guard.milder)
            changed["target"] = step.target.model_copy(update={name: round(stays, 9)})
    if isinstance(step.layers, int) and step.layers > 1:
        changed["layers"] = max(1, int(step.layers * guard.milder))
    if isinstance(step.layers, tuple) and len(step.layers) > 1:
        changed["layers"] = step.layers[: max(1, int(len(step.layers) * guard.milder))]
    return replace(planned, step=step.model_copy(update=changed))


def _own_teacher(step: Step) -> Path | None:
    return step.teacher if isinstance(step, Distill) else None


def flow_toml(recipe: FlowRecipe) -> str:
    """The recipe with every default and override written out, as TOML that `penjing compress` reads again."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    steps = values.pop("steps")
    lines = [f"{key} = {_toml(value)}" for key, value in values.items() if not isinstance(value, dict)]
    for section, content in values.items():
        if isinstance(content, dict):
            lines += ["", f"[{section}]", *_pairs(content)]
    for step in steps:
        lines += ["", "[[steps]]", *_pairs(step)]
    return "\n".join(lines) + "\n"


def _pairs(content: dict[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in content.items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(_pairs(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)  # JSON's strings, numbers and booleans are TOML as they stand
