"""What a finished run tells the user: what was reached, how fast, where it lies, what to type next."""

from __future__ import annotations

import math
from pathlib import Path

from penjing.core.progress import clock, plural
from penjing.train.monitor.monitor import Monitor, speed


def summary(
    output: Path,
    run: Path,
    steps: int,
    seconds: float,
    monitor: Monitor,
    unit: str,
    evaluation: dict[str, float],
    next_command: str,
    interim: bool = False,
) -> str:
    """Lines for the terminal.

    Args:
        output, run: the checkpoint folder and the run's.
        steps: updates of the whole run.
        seconds: since the command began; may be less than the run took, when it was resumed.
        unit: what the run's rates count ("tokens").
        evaluation: means over the held-out data; may be empty.
        interim: both folders go when what the run is a part of has taken them, so they are not told.
    """
    rows: list[tuple[str, str]] = []
    if monitor.last:
        rows.append(("loss", f"{monitor.last['loss']:.4f} (last step)"))
    if evaluation:
        # The loss is a token's negative log-probability, but where the model answers by itself.
        likely = unit == "tokens" and "ended" not in evaluation
        rows.append(("held out", ", ".join(_value(name, value, likely) for name, value in evaluation.items())))
    if monitor.seconds:
        rate = monitor.count / monitor.seconds
        learnt = None if monitor.learnt == monitor.count else monitor.learnt / monitor.seconds
        rows.append(("speed", f"{speed(rate, learnt, unit)}, MFU {monitor.mfu(rate):.0%}"))
    if not interim:
        rows += [("checkpoint", str(output)), ("run", f"{run} (metrics, training state)"), ("next", next_command)]
    return "\n".join(
        [
            f"{plural(steps, 'step')}, {clock(seconds)} in all",
            *(f"  {name:<10}  {text}" for name, text in rows if text),
        ]
    )


def _value(name: str, value: float, likely: bool) -> str:
    if name == "accuracy":
        return f"accuracy {value:.2%}"
    perplexity = f" (perplexity {math.exp(value):.1f})" if name == "loss" and likely and value < 20 else ""
    return f"{name} {value:.4f}{perplexity}"
