"""Draw the loss curves of training runs into one small SVG, readable on light and dark pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lib.plot_engine import INK
from penjing.core.errors import ConfigError, InputError

COLORS = ("#2f9e6e", "#c2622d", "#4c78c8", "#9b59b6", "#828c9a")
Curve = tuple[list[int], list[float]]


def read_runs(given: Sequence[str]) -> dict[str, Curve]:
    """The curves of runs, given as "NAME=FOLDER": of training, and of held-out data where they were measured.

    Raises:
        ConfigError: no "=" in one of them.
        InputError: a folder holds no metrics.
    """
    curves: dict[str, Curve] = {}
    for each in given:
        name, equals, folder = each.partition("=")
        if not equals:
            raise ConfigError(f"{each!r}: write NAME=FOLDER")
        curves[f"{name}, training"] = read_curve(Path(folder), "loss")
        if held_out := read_curve(Path(folder), "eval/loss")[0]:
            curves[f"{name}, held out"] = (held_out, read_curve(Path(folder), "eval/loss")[1])
    return curves


def read_curve(run: Path, key: str) -> Curve:
    """(steps, values) of `key` in a run's metrics.jsonl.

    Raises:
        InputError: the folder holds no metrics.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        raise InputError(f"{path} does not exist; name the folder of a run")
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw(curves: dict[str, Curve], out: Path, label: str = "loss (nats per token)") -> Path:
    """Draw `curves` by name; those measured rarely (30 points or fewer) are drawn with dots."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "penjing", "font.family": "sans-serif"})
    figure, axis = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    figure.patch.set_alpha(0)
    axis.set_facecolor("none")
    for color, (name, (steps, values)) in zip(_cycle(COLORS, len(curves)), curves.items(), strict=True):
        rare = len(steps) <= 30
        axis.plot(steps, values, color=color, linewidth=1.4, marker="o" if rare else None, markersize=4, label=name)
    axis.set_xlabel("step", color=INK)
    axis.set_ylabel(label, color=INK)
    axis.tick_params(colors=INK)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, transparent=True, metadata={"Date": None})
    pyplot.close(figure)
    return out


def _cycle(colors: Sequence[str], count: int) -> list[str]:
    return [colors[index % len(colors)] for index in range(count)]
