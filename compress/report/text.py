"""Figures of a run as people read them, in tables, figures and on the terminal: the same for every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from penjing.core.progress import megabytes

if TYPE_CHECKING:
    from penjing.compress.measure.evaluate import Quality
    from penjing.compress.report.schema import Answered, Report, Stage


@dataclass(frozen=True)
class Reading:
    """How a quality is read.

    Attributes:
        axis: the label of a figure.
        meaning: a sentence for somebody who meets it for the first time.
        larger_is_better: so it is of all but perplexity.
        scale: shown ÷ stored; a share is shown in percent.
        digits: after the point.
        unit: behind a value.
        loss_scale, loss_digits, loss_unit: the same of a `Change`.
        samples: what it was measured on.
        parts: what its parts are, above their table.
    """

    axis: str
    meaning: str
    larger_is_better: bool = True
    scale: float = 1
    digits: int = 4
    unit: str = ""
    loss_scale: float = 1
    loss_digits: int = 4
    loss_unit: str = ""
    samples: str = "samples"
    parts: str = "other measures"

    def number(self, value: float) -> str:
        """Without its unit: "93.52"."""
        return f"{self.scale * value:.{self.digits}f}"

    def loss(self, value: float) -> str:
        """Without its unit, with its sign: "+0.31"."""
        return f"{self.loss_scale * value:+.{self.loss_digits}f}"


_share = partial(Reading, scale=100, digits=2, unit=" %", loss_scale=100, loss_digits=2, loss_unit=" points")
READINGS = {
    "accuracy": _share(
        samples="images",
        axis="accuracy, %",
        meaning="Accuracy is the share of images whose class the network names rightly; larger is better.",
    ),
    "agreement": _share(
        axis="agreement, %",
        meaning="Agreement is the share of samples that the network puts into the class that the first stage puts them "
        "into; larger is better.",
    ),
    "score": Reading(
        axis="score (higher is better)",
        meaning="The score is the mean of what the recipe's own metric says of each sample; larger is better.",
    ),
    "similarity": Reading(
        axis="similarity (1 is equal)",
        meaning="Similarity is the mean cosine between the embedding of a text, or the outputs for a sample, and those "
        "of the first stage; 1 means that they point the same way.",
    ),
    "perplexity": Reading(
        larger_is_better=False,
        digits=3,
        loss_scale=100,
        loss_digits=2,
        loss_unit=" %",
        samples="windows of text",
        parts="perplexity by text",
        axis="perplexity (lower is better)",
        meaning="Perplexity says among how many equally likely tokens the model hesitates, on average, before each "
        "next token of the text; smaller is better.",
    ),
}
"""Name of a quality → how it is read."""


def badness(quality: Quality) -> float:
    """A number that is smaller for a better quality of the same name."""
    return -quality.value if READINGS[quality.name].larger_is_better else quality.value


def quality_text(stage: Stage) -> str:
    """Such as "93.52 % (93.01–94.00)", or "11.230 (10.712–11.801)"; without brackets where there is no interval."""
    quality, reading = stage.quality, READINGS[stage.quality.name]
    low, high = reading.number(quality.low), reading.number(quality.high)
    return f"{reading.number(quality.value)}{reading.unit}" + (f" ({low}–{high})" if quality.record else "")


def loss_text(report: Report, stage: Stage) -> str:
    """What `stage` lost against the first: points of accuracy, similarity, or the share that perplexity rose by."""
    return _ranged(_loss(report, stage), READINGS[stage.quality.name])


def loss_in_words(report: Report, stage: Stage) -> str:
    """The same in words, such as "lost +0.31 points (-0.10…+0.72)", or where it is below 0 "gained +1.20 points …"."""
    return _in_words(_loss(report, stage), partial(_ranged, reading=READINGS[stage.quality.name]))


def _loss(report: Report, stage: Stage) -> list[float]:
    """Value, low and high; without samples the value alone."""
    change, before, after = report.lost(stage), report.first.quality, stage.quality
    if change is not None:
        return [change.value, change.low, change.high]
    return [before.value - after.value if READINGS[before.name].larger_is_better else after.value / before.value - 1]


def _ranged(values: Sequence[float], reading: Reading) -> str:
    value, *interval = map(reading.loss, values)
    return f"{value}{reading.loss_unit}" + (f" ({'…'.join(interval)})" if interval else "")


def answer_text(figure: Answered) -> str:
    """Such as "87.5 % (81.2–92.9)", or "14.3 tokens (11.0–17.9)"."""
    scale, digits, unit = (100, 1, "%") if figure.unit == "share" else (1, 1, figure.unit)
    value, low, high = (f"{scale * each:.{digits}f}" for each in (figure.value, figure.low, figure.high))
    return f"{value} {unit} ({low}–{high})"


def answer_loss_text(figure: Answered) -> str:
    """What the figure lost against the first stage, such as "+1.5 points (-0.5…3.5)"; empty for a comparison."""
    return "" if figure.lost is None else _points(figure.lost)


def answer_said(figure: Answered) -> str:
    """The figure, and what it lost in words, such as "87.5 % (81.2–92.9), lost +1.5 points (-0.5…3.5)"."""
    return answer_text(figure) + ("" if figure.lost is None else f", {_in_words(figure.lost, _points)}")


def answer_line(figure: Answered) -> str:
    """The figure for the terminal."""
    return f"{figure.task}, {figure.measure}: {answer_said(figure)}"


def _points(values: Sequence[float]) -> str:
    value, low, high = (f"{100 * each:+.1f}" for each in values)
    return f"{value} points ({low}…{high})"


def _in_words(values: Sequence[float], say: Callable[[Sequence[float]], str]) -> str:
    """A loss, its low and its high; where it is below 0, as a gain."""
    if values[0] < 0:
        return f"gained {say([0 - value for value in (values[0], *values[:0:-1])])}"  # 0 - 0 has no sign
    return f"lost {say(values)}"


def summary_line(report: Report) -> str:
    """One line for the terminal: what the run gained and cost."""
    first, last = report.first, report.last
    said = [f"{megabytes(first.size.bytes)} → {megabytes(last.size.bytes)}"]
    if first.size.macs and last.size.macs:
        said.append(f"{last.size.macs / first.size.macs:.0%} of the multiply-accumulates")
    before, after = first.quality.value, last.quality.value
    if first.quality.name in ("accuracy", "agreement"):
        said.append(f"{first.quality.name} {before:.2%} → {after:.2%} ({100 * (after - before):+.2f} points)")
    elif first.quality.name in ("similarity", "score"):
        said.append(f"{first.quality.name} {after:.4f}")
    else:
        said.append(f"perplexity {before:.2f} → {after:.2f} ({after / before - 1:+.2%})")
    said.append(f"{sum(stage.seconds for stage in report.stages):.0f} s for the steps")
    return ", ".join(said)
