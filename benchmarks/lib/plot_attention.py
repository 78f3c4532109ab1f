"""Draw docs/figures/attention.svg from benchmarks/results/attention.jsonl: time and memory of a layer by its length."""

from __future__ import annotations

from pathlib import Path

from lib.plot_engine import INK
from lib.plot_train import COLORS
from lib.rows import Row, latest
from penjing.core.errors import InputError

NAMES = {"full": "full (SDPA)", "window_512": "window 512", "window_1024": "window 1024", "lsh_1": "LSH, 1 round"}
NAMES["lsh_2"] = "LSH, 2 rounds"
PANELS = {"step": "Forward and backward, ms", "memory": "Peak memory, MiB"}


def curve(rows: list[Row], subject: str, what: str, name: str) -> list[tuple[int, float]]:
    """(tokens, value) of one contestant, by tokens; the newest row of each."""
    prefix = f"{subject}_{what}_{name}_"
    points = {
        int(row.metric.removeprefix(prefix)): row.value
        for row in rows
        if row.metric.startswith(prefix) and row.metric.removeprefix(prefix).isdigit() and row.value is not None
    }
    return sorted(points.items())


def draw(rows: list[Row], out: Path, subject: str = "layer") -> Path:
    """`out/attention.svg`.

    Raises:
        InputError: there are no measured rows.
    """
    measured = latest([row for row in rows if row.value is not None])
    if not curve(measured, subject, "step", "full"):
        raise InputError("no rows of attention to draw; run: python benchmarks/run_attention.py")
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "penjing", "font.family": "sans-serif"})
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    figure.patch.set_alpha(0)
    for axis, (what, title) in zip(axes, PANELS.items(), strict=True):
        axis.set_facecolor("none")
        for color, (name, label) in zip(COLORS, NAMES.items(), strict=True):
            points = curve(measured, subject, what, name)
            axis.plot(*zip(*points, strict=True), color=color, linewidth=1.4, marker="o", markersize=4, label=label)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = [tokens for tokens, _ in curve(measured, subject, what, "full")]
        axis.set_xticks(ticks, [f"{tokens // 1024}k" for tokens in ticks])
        axis.minorticks_off()
        axis.set_title(title, loc="left", fontsize=10, color=INK)
        axis.set_xlabel("tokens", color=INK)
        axis.tick_params(colors=INK)
        for side, spine in axis.spines.items():
            spine.set_visible(side in ("left", "bottom"))
            spine.set_color(INK)
    axes[0].legend(frameon=False, labelcolor=INK, fontsize=9)
    newest = max(measured, key=lambda row: row.date)
    figure.supxlabel(
        f"one sequence, one attention {subject} · {newest.device}, {newest.cores} cores", fontsize=9, color=INK
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / "attention.svg"
    figure.savefig(path, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return path
