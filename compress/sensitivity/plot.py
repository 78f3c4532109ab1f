"""The figure of every sensitivity study: layers or groups from left to right, a line for each setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from penjing.compress.report.page import AFTER, OTHERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_lines(
    axes: Axes,
    names: Sequence[str],
    lines: Mapping[str, Sequence[float]],
    label: str,
    *,
    whole: float | None = None,
    log: bool = False,
) -> None:
    """Draw `lines`, label → one value for each of `names`, and that of the whole network where there is one."""
    for place, (name, values) in enumerate(lines.items()):
        color = [AFTER, *OTHERS][place % (1 + len(OTHERS))]
        axes.plot(range(len(names)), values, marker="o", markersize=4, color=color, label=name)
    if whole is not None:
        axes.axhline(whole, color="#9aa5b1", linewidth=1, linestyle="--", label="whole")
    axes.set_xticks(range(len(names)), list(names), rotation=90, fontsize=6)
    axes.set_ylabel(label)
    if log:
        axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
