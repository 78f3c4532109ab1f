"""Draw docs/figures/engine.svg and engine-int4.svg from benchmarks/results/{engine,server}.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.rows import Row, kind, latest
from penjing.core.errors import InputError

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
OURS, OTHERS, INK = "#2f9e6e", "#828c9a", "#7d8590"  # each at least 3:1 on white and on GitHub's dark page (#0d1117)
TITLES = {
    "prefill_512": "Prefill\n512-token prompt",
    "one_stream": "One stream\ndecode",
    "streams_16": "16 streams\nwith their prompts of 128",
}


INT4 = "int4/"  # what the names of metrics of 4-bit weights begin with


def draw_engine(engine: list[Row], server: list[Row], out: Path) -> Path:
    """`out/engine.svg`: tokens per second of the engine, of the engine through Triton server, and of the peers.

    Raises:
        InputError: there are no measured rows of the engine.
    """
    own = [row for row in engine if "/" not in row.metric]
    return _draw(own, {metric: engine_bars(own, server, metric) for metric in TITLES}, out / "engine.svg")


def draw_int4(engine: list[Row], out: Path) -> Path:
    """`out/engine-int4.svg`: the same of 4-bit weights, beside peers in 4 bits and our own INT8.

    Raises:
        InputError: there are no measured rows of them.
    """
    own = [row for row in engine if row.metric.startswith(INT4)]
    panels = {metric: engine_bars(own, [], INT4 + metric, "penjing 4 bits") for metric in TITLES}
    return _draw(own, panels, out / "engine-int4.svg")


def _draw(rows: list[Row], panels: dict[str, list[tuple[str, float]]], path: Path) -> Path:
    if not all(panels.values()):
        raise InputError("no engine rows to draw; run: python benchmarks/run_engine.py --peers all --through-server")
    newest = max((row for row in rows if row.value is not None), key=lambda row: row.date)
    plot, figure, axes = _panels(len(panels), max(len(bars) for bars in panels.values()))
    names = [name for name, _ in panels["streams_16"]]
    colours = [OURS if name.startswith("penjing") else OTHERS for name in names]
    for axis, (metric, bars) in zip(axes, panels.items(), strict=True):
        speeds = dict(bars)
        values = [speeds.get(name, 0.0) for name in names]
        drawn = axis.barh(names, values, color=colours)
        axis.bar_label(drawn, labels=[f"{value:,.0f}" for value in values], padding=3, color=INK, fontsize=9)
        axis.set_title(TITLES[metric], loc="left", fontsize=10, color=INK)
        axis.set_xlim(0, 1.22 * max(values))  # room for the labels
    caption = f"new tokens per second (prefill: prompt tokens) · {newest.device}, {newest.cores} cores"
    figure.supxlabel(caption, fontsize=9, color=INK)
    return _save(plot, figure, path)


def engine_bars(
    engine: list[Row], server: list[Row], metric: str, name: str = "penjing INT8"
) -> list[tuple[str, float]]:
    """(name, tokens/s), the slowest first; a peer's speed is ours ÷ the ratio of the same run."""
    ours = [row for row in engine if row.metric == metric and row.value is not None]
    if not ours:
        return []
    bars = {name: max(ours, key=lambda row: row.date).value}
    for row in latest([row for row in server if row.metric == metric and row.value is not None]):
        bars["penjing via Triton server"] = row.value
    for row in latest(ours):
        if row.baseline and row.ratio and row.value:
            bars[kind(row.baseline)] = row.value / row.ratio
    return sorted(((name, value) for name, value in bars.items() if value is not None), key=lambda bar: bar[1])


def _panels(count: int, num_bars: int) -> tuple[Any, Any, Any]:
    """(pyplot, figure, axes) in a style that suits any background."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # text stays text: the page's sans-serif, a tenth of the bytes of outlines; the salt makes equal rows equal files
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "penjing", "font.family": "sans-serif"})
    size = (10, 1.2 + 0.28 * num_bars)
    figure, axes = pyplot.subplots(1, count, figsize=size, layout="constrained", sharey=True)
    figure.patch.set_alpha(0)
    for axis in axes:
        axis.set_facecolor("none")
        axis.tick_params(axis="y", colors=INK, labelsize=9, length=0)
        axis.xaxis.set_visible(False)
        for spine in axis.spines.values():
            spine.set_visible(False)
    return pyplot, figure, axes


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return path
