"""How many equal pieces of work each of several workers takes, by the time that each needs for one."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penjing.core.errors import ConfigError

_WINDOW = 5  # steps whose median tells the speed: two that something disturbed move nothing
_FEWEST = 3  # steps seen before anything is changed


@dataclass(frozen=True)
class ShareBalancer:
    """Who computes how many micro-batches; a pure function of what was observed, so that all processes that are handed
    the same times decide the same.

    Attributes:
        counts: micro-batches of each process in a step, 1 or more.
        gain: share of a step that a change must promise, so that noise moves nothing.
        seen: for each of the last steps, seconds of one micro-batch in each process.
    """

    counts: tuple[int, ...]
    gain: float = 0.05
    seen: tuple[tuple[float, ...], ...] = ()

    def observe(self, seconds: Sequence[float]) -> ShareBalancer:
        """Take in a step.

        Raises:
            ConfigError: not a time above 0 for each process.
        """
        if len(seconds) != len(self.counts) or not all(0 < each < float("inf") for each in seconds):
            raise ConfigError(f"{len(self.counts)} times above 0 seconds are needed, got {list(seconds)}")
        return replace(self, seen=(*self.seen, tuple(seconds))[-_WINDOW:])

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of one micro-batch in each process: the median of what was seen."""
        return tuple(map(statistics.median, zip(*self.seen, strict=True)))

    def decide(self) -> tuple[int, ...]:
        """The counts of the next step: those of the shortest one, if it promises `gain`."""
        if len(self.seen) < _FEWEST:
            return self.counts
        seconds = self.seconds
        best = fairest(seconds, sum(self.counts))
        return best if _longest(best, seconds) < (1 - self.gain) * _longest(self.counts, seconds) else self.counts

    @property
    def idle(self) -> float:
        """The share of the processes' time that is spent waiting for the slowest, as far as is known: from 0 to 1."""
        if not self.seen:
            return 0.0
        busy = [count * each for count, each in zip(self.counts, self.seconds, strict=True)]
        return 1 - sum(busy) / (len(busy) * max(busy))


def fairest(seconds: Sequence[float], total: int) -> tuple[int, ...]:
    """How many of `total` equal pieces each worker takes, at least one, so that the last is done soonest; worker i
    takes seconds[i] for a piece. Each piece goes to whom it would be done soonest, which is best for equal pieces.
    """
    counts = [1] * len(seconds)
    ends = [(2 * each, worker) for worker, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(total - len(counts)):
        end, worker = ends[0]
        counts[worker] += 1
        heapq.heapreplace(ends, (end + seconds[worker], worker))
    return tuple(counts)


def _longest(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return max(count * each for count, each in zip(counts, seconds, strict=True))
