"""Figures of one run: speed, widths of layers, and what rounding did to each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from penjing.compress.report.pareto import Point, draw_pareto
from penjing.core.pages.page import AFTER, BEFORE, OTHERS, figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from penjing.compress.report.schema import LayerError, Report

MOST_BARS = 60  # more layers than this cannot be told apart: those that changed are shown
MOST_LINES = 12  # kinds of layers in one figure
Lines = dict[str, list[tuple[int, float]]]  # kind of layer → depth and output error of each


def size_figure(report: Report) -> Markup:
    """Quality against the weights' bytes, of every stage."""
    points = [Point(stage.name, stage.size.bytes / 1e6, stage.quality) for stage in report.stages]
    return figure(lambda axes: draw_pareto(axes, points, "weights, MB"), 4.6, 3.4)


def speed_figure(report: Report) -> Markup:
    """Quality against speed in the last case that all stages have: the largest batch, decoding; empty without one."""
    if not (cases := report.cases()):
        return Markup("")
    rows = [(stage, stage.by_case()[cases[-1]]) for stage in report.stages]
    points = [Point(stage.name, row.speedup, stage.quality, larger=True) for stage, row in rows]
    label = f"speed against {report.first.name} ({cases[-1]})"
    return figure(lambda axes: draw_pareto(axes, points, label), 4.6, 3.4)


def widths_figure(before: dict[str, int], after: dict[str, int]) -> Markup:
    """Channels or features of each layer, before and after, as `changed_widths` chose them; empty without any."""
    return figure(lambda axes: _draw_widths(axes, before, after), 9.5, 3.8) if before else Markup("")


def errors_figure(layers: Sequence[LayerError]) -> Markup:
    """Output errors: a line for each kind of layer over depth where names have a number, else a bar for each layer."""
    if not layers:
        return Markup("")
    lines = lines_by_kind(layers)
    return figure(lambda axes: _draw_lines(axes, lines) if lines else _draw_bars(axes, layers), 9.5, 3.6)


def lines_by_kind(layers: Sequence[LayerError]) -> Lines:
    """Errors by kind of layer and depth, "model.layers.7.mlp.down_proj" being kind "down_proj" at 7.

    Empty where fewer than half of the names have a number, or there are too many kinds to tell apart.
    """
    kinds: dict[str, list[tuple[int, float]]] = {}
    for row in layers:
        parts = row.name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdigit()), None)
        if place is not None and parts[place + 1 :]:
            kinds.setdefault(".".join(parts[place + 1 :]), []).append((int(parts[place]), row.output))
    if 2 * sum(map(len, kinds.values())) < len(layers) or len(kinds) > MOST_LINES or len(kinds) == len(layers):
        return {}
    last = [kind.rpartition(".")[2] for kind in kinds]
    short = last if len(set(last)) == len(last) else list(kinds)
    return dict(zip(short, kinds.values(), strict=True))


def changed_widths(before: dict[str, int], after: dict[str, int]) -> tuple[dict[str, int], dict[str, int], int]:
    """The widths to show, and how many layers are left out.

    Where there are too many for one chart, kinds of layers (names up to their numbers) of which none changed are left
    out, and those that changed exactly as a kind before them, such as gate_proj and up_proj.
    """
    if len(before) <= MOST_BARS:
        return before, after, 0
    kinds: dict[str, list[str]] = {}
    for name in before:
        kinds.setdefault(".".join("N" if part.isdigit() else part for part in name.split(".")), []).append(name)
    shown: list[str] = []
    seen: list[list[tuple[int, int]]] = []
    for names in kinds.values():
        pairs = [(before[name], after.get(name, 0)) for name in names]
        if all(old == new for old, new in pairs) or pairs in seen:
            continue
        seen.append(pairs)
        shown += names
    return {name: before[name] for name in shown}, after, len(before) - len(shown)


def _draw_lines(axes: Axes, lines: Lines) -> None:
    from matplotlib.ticker import MaxNLocator

    colors = [AFTER, *OTHERS, BEFORE]
    for place, (kind, points) in enumerate(lines.items()):
        depths, errors = [depth for depth, _ in points], [100 * error for _, error in points]
        style = "-" if place < len(colors) else "--"
        axes.plot(depths, errors, marker=".", linestyle=style, color=colors[place % len(colors)], label=kind)
    axes.set(xlabel="layer", ylabel="output error, %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=min(len(lines), 7), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _draw_bars(axes: Axes, layers: Sequence[LayerError]) -> None:
    places = range(len(layers))
    axes.bar(places, [100 * row.output for row in layers], color=AFTER, width=0.8, label="output")
    axes.plot(places, [100 * row.weight for row in layers], "_", color=BEFORE, label="weight")
    axes.set_xticks(places, [row.name for row in layers], rotation=90, fontsize=7 if len(layers) <= MOST_BARS else 5)
    axes.set_ylabel("error, %")
    axes.margins(x=0.01)
    axes.legend(frameon=False, fontsize=8)


def _draw_widths(axes: Axes, before: dict[str, int], after: dict[str, int]) -> None:
    places = range(len(before))
    axes.bar(places, list(before.values()), color=BEFORE, width=0.8)
    axes.bar(places, [after.get(name, 0) for name in before], color=AFTER, width=0.8)
    if len(before) <= 2 * MOST_BARS:
        axes.set_xticks(places, list(before), rotation=90, fontsize=7 if len(before) <= MOST_BARS // 2 else 5)
    axes.set_ylabel("channels or features")
    axes.margins(x=0.01)
