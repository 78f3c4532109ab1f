"""What a computation holds at once."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that `run` has allocated at once beside what was there."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    now = peak = 0
    for event in recorded.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
            peak = max(peak, now)
    return peak
