"""Dynamic micro-batches: watches the times of pipeline stages and chooses the size that makes a step shortest.

Smaller micro-batches fill the pipeline sooner (the bubble shrinks with their number) but pay a fixed price each:
launches, Python, matrix products too small for the machine. Neither is known before it is measured, and both drift.
So the balancer fits, for every stage, seconds = fixed + rate × samples to what it sees, simulates the schedule for
every size that divides the batch, and moves to the best one. The tokens of a step, and so its gradient, stay the same:
sizes are equal within a step because torch's stages receive into buffers of one shape.

Everything is a pure function of the observations: ranks that are handed the same times decide the same, so gather them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penjing.core.errors import ConfigError
from penjing.train.pipeline.schedules import Schedule, chunks_of, pipeline_order
from penjing.train.pipeline.simulate import StageTimes, Timeline, simulate


@dataclass(frozen=True)
class Observation:
    """One step: mean seconds of a forward and of a whole backward pass of each stage, with `size` samples."""

    size: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]


@dataclass(frozen=True)
class Decision:
    """The micro-batch size of the next step."""

    size: int
    reason: str


@dataclass(frozen=True)
class MicroBatchBalancer:
    """The state of the balancer; `observe` and `decide` return new values and change nothing.

    Attributes:
        batch: samples of a step on one pipeline; every size divides it.
        largest: samples a micro-batch may have, by memory.
        send: seconds to pass a sample's activations to the next rank.
        gain: share of a step that a change must promise, so that noise moves nothing.
        keep: weight of the past against a new observation; 0.8 forgets half in three steps.
        seen: the running mean of each size; the newest observation is of `size` samples.
    """

    schedule: Schedule
    ranks: int
    batch: int
    largest: int
    chunks: int | None = None
    send: float = 0.0
    gain: float = 0.02
    keep: float = 0.8
    size: int = 0
    seen: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ConfigError(
                f"no micro-batch size works: schedule {self.schedule} over {self.ranks} ranks, a batch of {self.batch} "
                f"samples, at most {self.largest} in a micro-batch; raise data.batch_size or lower parallel.pp"
            )
        if self.size and self.size not in self.sizes:
            raise ConfigError(f"micro-batch size {self.size} is none of {self.sizes}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes that divide the batch, fit into memory and give a number of micro-batches that the schedule can run."""
        found = []
        for size in range(1, min(self.largest, self.batch) + 1):
            if self.batch % size == 0:
                try:
                    pipeline_order(self.schedule, self.ranks, self.batch // size, self.chunks)
                except ConfigError:
                    continue
                found.append(size)
        return tuple(found)

    def observe(self, seen: Observation) -> MicroBatchBalancer:
        """Take in the times of a step. What changed since the size was last seen is taken to have changed at all sizes
        alike, so a machine that slows down does not look like a price of its size.

        Raises:
            ConfigError: not a time above 0 for each stage.
        """
        stages = self.ranks * chunks_of(self.schedule, self.chunks)
        if not (len(seen.forward) == len(seen.backward) == stages and seen.size > 0):
            raise ConfigError(f"an observation needs a size and {stages} stage times, got {len(seen.forward)}")
        if min(*seen.forward, *seen.backward) <= 0:
            raise ConfigError("stage times must be above 0 seconds")
        before = next((old for old in self.seen if old.size == seen.size), None)
        if before is None:
            return replace(self, size=seen.size, seen=(*self.seen, seen))
        forward = _drift(before.forward, seen.forward, self.keep)
        backward = _drift(before.backward, seen.backward, self.keep)
        moved = tuple(
            Observation(old.size, _scaled(old.forward, forward), _scaled(old.backward, backward)) for old in self.seen
        )
        return replace(self, size=seen.size, seen=moved)

    def decide(self) -> Decision:
        """The size for the next step: first the largest, then the one below to tell fixed from proportional cost, then
        the best by prediction, if it promises `gain`."""
        sizes = self.sizes
        if not self.size:
            return Decision(sizes[-1], "nothing seen yet: the largest that fits")
        if len(self.seen) == 1 and len(sizes) > 1:
            at = sizes.index(self.size) if self.size in sizes else len(sizes) - 1
            probe = sizes[at - 1] if at else sizes[1]
            return Decision(probe, f"a second size, to tell fixed from proportional cost (seen: {self.size})")
        lines = {size: self.predict(size) for size in sizes}
        best = min(sizes, key=lambda size: (lines[size].makespan, -size))
        now = lines.get(self.size)
        if now is not None and lines[best].makespan > (1 - self.gain) * now.makespan:
            return Decision(self.size, f"no size promises {self.gain:.0%} more")
        gain = "" if now is None else f", {1 - lines[best].makespan / now.makespan:.1%} less time than with {self.size}"
        return Decision(best, f"bubble {lines[best].bubble:.1%} expected{gain}")

    def predict(self, size: int) -> Timeline:
        """The step as it would go with micro-batches of `size` samples.

        Raises:
            ConfigError: nothing was observed yet.
        """
        if not self.seen:
            raise ConfigError("nothing was observed yet; call observe first")
        sizes = [seen.size for seen in self.seen]
        forward = tuple(_at(size, sizes, times) for times in zip(*(seen.forward for seen in self.seen), strict=True))
        backward = [_at(size, sizes, times) for times in zip(*(seen.backward for seen in self.seen), strict=True)]
        half = tuple(seconds / 2 for seconds in backward)
        times = StageTimes(forward, half, half, send=self.send * size)
        return simulate(self.schedule, self.ranks, times, [1.0] * (self.batch // size), chunks=self.chunks)


def _drift(old: Sequence[float], new: Sequence[float], keep: float) -> tuple[float, ...]:
    return tuple(keep + (1 - keep) * b / a for a, b in zip(old, new, strict=True))


def _scaled(times: Sequence[float], factors: Sequence[float]) -> tuple[float, ...]:
    return tuple(time * factor for time, factor in zip(times, factors, strict=True))


def _at(size: int, sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Seconds at `size` on the least-squares line through (sizes, seconds), whose both parts are 0 or more; through the
    origin while one size alone was seen."""
    n, x, y = len(sizes), sum(sizes), sum(seconds)
    xx = sum(s * s for s in sizes)
    xy = sum(s * t for s, t in zip(sizes, seconds, strict=True))
    if n == 1:
        return y / x * size
    rate = (n * xy - x * y) / (n * xx - x * x)
    fixed = (y - rate * x) / n
    if rate < 0:
        return y / n
    return fixed + rate * size if fixed > 0 else xy / xx * size
