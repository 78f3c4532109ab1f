"""Whether a result keeps its budget, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from penjing.compress.measure.evaluate import EvaluateSettings, Quality, compare
from penjing.compress.plan import Planned
from penjing.compress.recipe import Guard

Outcome = Literal["kept", "repeated milder", "left out", "stopped"]


@dataclass(frozen=True)
class Verdict:
    """One check.

    Attributes:
        loss: accuracy points, the fall of similarity, or the ratio of perplexities; larger is worse.
        low, high: its 95 % interval, over the same samples.
        budget: the most that `loss` may be.
        unit: such as "accuracy points lost" or "times the perplexity".
    """

    loss: float
    low: float
    high: float
    budget: float
    unit: str

    @property
    def within(self) -> bool:
        """Whether the budget is kept. The measured value decides; its interval is for the reader."""
        return self.loss <= self.budget

    def __str__(self) -> str:
        said, interval = loss_said(self.loss, self.low, self.high, self.unit)
        return f"{said} (95 %: {interval}), budget {self.budget:g}"


def loss_said(loss: float, low: float, high: float, unit: str) -> tuple[str, str]:
    """A loss, and its interval, in words: what is lost, or where it is below 0 what is gained.

    >>> loss_said(-4.5, -6.25, 1.0, "accuracy points lost")
    ('4.5 accuracy points gained', '-1 … 6.25')
    """
    if loss < 0 and (what := unit.removesuffix(" lost")) != unit:
        loss, low, high, unit = -loss, -high, -low, f"{what} gained"
    return f"{loss:.5g} {unit}", f"{low:.5g} … {high:.5g}"


def judge(before: Quality, after: Quality, guard: Guard, settings: EvaluateSettings) -> Verdict:
    """Compare on the same samples.

    Raises:
        InputError: they were measured on different samples.
    """
    change = compare(before, after, settings)
    value, low, high = change.value, change.low, change.high
    if before.name in ("accuracy", "agreement"):
        return Verdict(100 * value, 100 * low, 100 * high, guard.accuracy_points, f"{before.name} points lost")
    if before.name == "score":
        return Verdict(value, low, high, guard.score_loss, "of the score lost")
    if before.name == "similarity":
        return Verdict(value, low, high, guard.similarity_loss, "of similarity lost")
    return Verdict(1 + value, 1 + low, 1 + high, guard.perplexity_ratio, "times the perplexity")


def advice(stretch: list[Planned]) -> str:
    """What a user can change in the recipe where a stretch loses too much."""
    return ", ".join(["raise the budget in [guard]", *dict.fromkeys(planned.step.remedy for planned in stretch)])


def decision(
    stretch: list[Planned],
    attempt: int,
    qualities: tuple[Quality, Quality],
    verdict: Verdict,
    outcome: Outcome,
    then: list[Planned] | None = None,
) -> dict[str, Any]:
    """One entry of the report's `decisions`, JSON-ready.

    Args:
        qualities: of the reference, and of the result.
        then: the stretch as it is repeated.
    """
    before, after = qualities
    return {
        "steps": [planned.name for planned in stretch],
        "attempt": attempt,
        "metric": after.name,
        "reference": before.value,
        "value": after.value,
        "loss": verdict.loss,
        "loss_low": verdict.low,
        "loss_high": verdict.high,
        "budget": verdict.budget,
        "unit": verdict.unit,
        "outcome": outcome,
        "prunes": prunes(stretch),
        "prunes_next": None if then is None else prunes(then),
    }


def prunes(stretch: list[Planned]) -> dict[str, Any]:
    """How much each step of a stretch takes away, by its name."""
    return {planned.name: taken for planned in stretch if (taken := planned.step.weakens())}
