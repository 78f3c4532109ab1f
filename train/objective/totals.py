"""Sums of losses and metrics over the batches of a step or of an evaluation, and the means that they make."""

from __future__ import annotations

import torch

from penjing.train.objective.objective import Loss

_COUNT = "#"  # before the name of a metric: what its sum is divided by, where that is not the loss's count


def add(totals: dict[str, torch.Tensor], loss: Loss) -> None:
    """Add what `loss` sums to `totals`: name → sum."""
    values = {"loss": loss.total.detach(), **loss.metrics}
    for name, (total, count) in loss.counted.items():
        values |= {name: total, f"{_COUNT}{name}": count}
    for name, value in values.items():
        totals[name] = totals[name] + value if name in totals else value


def means(totals: dict[str, float], count: float) -> dict[str, float]:
    """Sums over their counts, without what was counted nowhere: a NaN is always one that was computed."""
    counts = {name: totals.get(f"{_COUNT}{name}", count) for name in totals if not name.startswith(_COUNT)}
    return {name: totals[name] / counted for name, counted in counts.items() if counted}
