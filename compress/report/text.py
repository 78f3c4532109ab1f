"""A stage's figures as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penjing.compress.report.schema import Report, Stage


def quality_text(stage: Stage) -> str:
    """Such as "93.52 % (93.01–94.00)", or "11.23 (10.71–11.80)"; without brackets where there is no interval."""
    quality = stage.quality
    if quality.name == "accuracy":
        interval = f" ({100 * quality.low:.2f}–{100 * quality.high:.2f})" if quality.record else ""
        return f"{100 * quality.value:.2f} %{interval}"
    return f"{quality.value:.3f}" + (f" ({quality.low:.3f}–{quality.high:.3f})" if quality.record else "")


def loss_text(report: Report, stage: Stage) -> str:
    """What `stage` lost against the first: points of accuracy, or how much of the perplexity came on top."""
    change, before, after = report.lost(stage), report.stages[0].quality, stage.quality
    if change is None:
        if before.name == "accuracy":
            return f"{100 * (before.value - after.value):+.2f} points"
        return f"{100 * (after.value / before.value - 1):+.2f} %"
    unit = "points" if before.name == "accuracy" else "%"
    return f"{100 * change.value:+.2f} {unit} ({100 * change.low:+.2f}…{100 * change.high:+.2f})"
