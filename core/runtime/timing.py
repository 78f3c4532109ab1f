"""Times of several computations taken in turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

MAX_CALLS = 1000  # of one computation in one round


def interleaved(
    calls: Sequence[Callable[[], object]],
    *,
    rounds: int,
    seconds: float,
    done: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of one call of each of `calls` in each round.

    In a round each takes its turn, a different one first each time, and is called until `seconds` have passed; its time
    is the median of its calls. Two calls before the first round warm up caches and allocators.

    Args:
        done: called after each turn, `rounds` × `len(calls)` times.
        now: the clock, in seconds.
    """
    for call in calls:
        call()
        call()
    found: list[list[float]] = [[] for _ in calls]
    for round_ in range(rounds):
        for turn in range(len(calls)):
            index = (turn + round_) % len(calls)
            found[index].append(_turn(calls[index], seconds, now))
            done()
    return found


def _turn(call: Callable[[], object], seconds: float, now: Callable[[], float]) -> float:
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < MAX_CALLS):
        began = now()
        call()
        times.append(now() - began)
    return median(times)


def summarise(times: Sequence[float], first: Sequence[float], amount: int) -> dict[str, Any]:
    """One computation's rounds as JSON-ready figures.

    Args:
        times: seconds of each round.
        first: those of the computation that it is compared with, in the same rounds.
        amount: images or tokens that one call handles.

    Returns:
        `seconds` (median), `low` and `high` (fastest and slowest round), `throughput` (a second), `speedup` (median
        over rounds of first ÷ this) with `speedup_low` and `speedup_high`, and `runs`.
    """
    ratios = [ours / theirs for ours, theirs in zip(first, times, strict=True)]
    middle = median(times)
    return {
        "seconds": middle,
        "low": min(times),
        "high": max(times),
        "throughput": amount / middle,
        "speedup": median(ratios),
        "speedup_low": min(ratios),
        "speedup_high": max(ratios),
        "runs": len(times),
    }
