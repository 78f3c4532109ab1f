"""Pareto plots: quality against cost, and which results nothing else beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penjing.compress.measure.evaluate import Quality
from penjing.compress.report.text import READINGS, badness
from penjing.core.pages.page import AFTER, BEFORE, OTHERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Point:
    """One result: `x` is a cost, or with `larger` a gain; `series` groups results of one run."""

    name: str
    x: float
    quality: Quality
    larger: bool = False
    series: str = ""


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one equals or beats in both cost and quality, cheapest first.

    Of points that are equal in both, the first.
    """
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (_cost(point), badness(point.quality))):
        if not best or badness(point.quality) < badness(best[-1].quality):
            best.append(point)
    return best


def _cost(point: Point) -> float:
    return -point.x if point.larger else point.x


def draw_pareto(axes: Axes, points: Sequence[Point], label: str) -> None:
    """Quality with its intervals against `label`; a line joins the front."""
    reading = READINGS[points[0].quality.name]
    scale = reading.scale
    along = front(points)
    axes.plot([p.x for p in along], [scale * p.quality.value for p in along], color=BEFORE, linewidth=1, zorder=1)
    said: set[tuple[str, float, float]] = set()
    series = list(dict.fromkeys(point.series for point in points))
    colors = [AFTER, *OTHERS]
    middle = (min(point.x for point in points) + max(point.x for point in points)) / 2
    for place, name in enumerate(series):
        own = [point for point in points if point.series == name]
        values = [scale * point.quality.value for point in own]
        below = [scale * (point.quality.value - point.quality.low) for point in own]
        above = [scale * (point.quality.high - point.quality.value) for point in own]
        color = colors[place % len(colors)]
        errors = [[max(0.0, size) for size in sizes] for sizes in (below, above)]
        axes.errorbar([p.x for p in own], values, yerr=errors, fmt="o", color=color, capsize=3, label=name or None)
        for point, value in zip(own, values, strict=True):
            if (here := (point.name, point.x, value)) in said:  # runs of one model begin at one place
                continue
            said.add(here)
            offset, side = ((-5, 5), "right") if point.x > middle else ((5, 5), "left")  # labels stay inside the axes
            where = {"xytext": offset, "textcoords": "offset points"}
            axes.annotate(point.name, (point.x, value), ha=side, fontsize=8, **where)
    axes.set_xlabel(label)
    axes.set_ylabel(reading.axis)
    axes.margins(0.15)
    if len(series) > 1:
        axes.legend(frameon=False)
