"""A discrete-event simulator of a pipeline: what a schedule does with given stage times.

Every rank does its work in the schedule's order; a piece starts when the rank is free and what it needs has arrived.
Sends are asynchronous and take no time of the sender, as with a separate copy engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penjing.core.errors import ConfigError
from penjing.train.pipeline.schedules import Order, Schedule, Work, pipeline_order, stage_ranks


@dataclass(frozen=True)
class StageTimes:
    """Seconds of each stage for a micro-batch of scale 1.

    Attributes:
        forward, backward_input, backward_weight: one value a stage; a whole backward pass is the sum of the latter two.
        send: from one rank to the next, for a micro-batch of scale 1.
        overhead: of every piece of work whatever its size (kernel launches, Python).
        overlap: of an overlapped pair, the share of the shorter half that is hidden (DualPipeV with its own kernels; 0:
            one after the other, as torch runs it).
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    send: float = 0.0
    overhead: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.forward, self.backward_input, self.backward_weight)
        if len({len(part) for part in parts}) != 1:
            raise ConfigError(f"stage times differ in length: {[len(part) for part in parts]}")
        if min(min(part, default=0) for part in parts) < 0 or min(self.send, self.overhead) < 0:
            raise ConfigError("times must not be negative")
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap={self.overlap} is a share; it must be in 0 … 1")

    @classmethod
    def of_costs(
        cls,
        forward: Sequence[float],
        *,
        backward: float = 2.0,
        send: float = 0.0,
        overhead: float = 0.0,
        overlap: float = 0.0,
    ) -> StageTimes:
        """From forward times alone: the backward pass takes `backward` times as long, half for inputs, half for
        weights."""
        half = tuple(cost * backward / 2 for cost in forward)
        return cls(tuple(forward), half, half, send, overhead, overlap)

    def seconds(self, work: Work, scale: float = 1.0) -> float:
        """What `work` takes on a micro-batch of `scale`."""
        stage = work.stage
        cost = {
            "F": self.forward[stage],
            "I": self.backward_input[stage],
            "W": self.backward_weight[stage],
            "B": self.backward_input[stage] + self.backward_weight[stage],
        }[work.kind]
        return cost * scale + self.overhead


@dataclass(frozen=True)
class Span:
    """`work` of `rank` from `start` to `end`, seconds."""

    rank: int
    work: Work
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What happened: spans in order of each rank, and what follows from them."""

    spans: tuple[Span, ...]
    ranks: int
    peak_live: tuple[float, ...] = field(default=())  # activations alive at most on each rank: Σ scale over its stages

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return max(span.end for span in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of work of each rank."""
        total, until = [0.0] * self.ranks, [0.0] * self.ranks
        for span in self.spans:  # of an overlapped pair only the union counts
            total[span.rank] += max(0.0, span.end - max(span.start, until[span.rank]))
            until[span.rank] = max(until[span.rank], span.end)
        return tuple(total)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time that is idle: 1 − Σ busy / (ranks × makespan)."""
        return 1 - sum(self.busy) / (self.ranks * self.makespan) if self.makespan else 0.0

    @property
    def longest_span(self) -> float:
        """Seconds from first start to last end of the rank where they lie furthest apart: the period of repeated steps
        where ranks need not wait for each other between them (the zero-bubble paper's measure)."""
        starts, ends = [float("inf")] * self.ranks, [0.0] * self.ranks
        for span in self.spans:
            starts[span.rank] = min(starts[span.rank], span.start)
            ends[span.rank] = max(ends[span.rank], span.end)
        return max(end - start for start, end in zip(starts, ends, strict=True))


def simulate(
    schedule: Schedule,
    ranks: int,
    times: StageTimes,
    scales: Sequence[float],
    *,
    chunks: int | None = None,
) -> Timeline:
    """Run one step of `schedule` over `ranks` ranks on micro-batches of the sizes `scales`.

    Args:
        times: of each stage; there are ranks × chunks.
        scales: size of each micro-batch, 1 being the one that `times` are for.

    Raises:
        ConfigError: torch's schedule refuses the numbers, or `times` are for another number of stages.
    """
    home = stage_ranks(schedule, ranks, chunks)
    if len(times.forward) != len(home):
        raise ConfigError(f"schedule {schedule} has {len(home)} stages here, but {len(times.forward)} times are given")
    return run_order(pipeline_order(schedule, ranks, len(scales), chunks), home, times, scales)


def run_order(order: Order, home: Sequence[int], times: StageTimes, scales: Sequence[float]) -> Timeline:
    """Run any `order` of work; `home[stage]` is the rank of a stage.

    Raises:
        ConfigError: the order waits for itself.
    """
    ranks, last = len(order), len(home) - 1
    done: dict[tuple[int, str, int], float] = {}  # end of each piece; a backward under "I" as soon as inputs are known
    free, position = [0.0] * ranks, [0] * ranks
    spans: list[list[Span]] = [[] for _ in order]

    def ready(work: Work) -> float | None:
        """When what `work` needs is here; None if not known yet."""
        stage, kind, micro_batch, _ = work
        if kind == "W":
            return done.get((stage, "I", micro_batch))
        needs = [] if kind == "F" else [(stage, "F")]
        if kind == "F" and stage:
            needs.append((stage - 1, "F"))
        if kind != "F" and stage < last:
            needs.append((stage + 1, "I"))
        latest = 0.0
        for source, what in needs:
            end = done.get((source, what, micro_batch))
            if end is None:
                return None
            away = home[source] != home[stage]
            latest = max(latest, end + (times.send * scales[micro_batch] if away else 0.0))
        return latest

    def advance(rank: int) -> bool:
        """Do what can be done next on `rank`."""
        work = order[rank][position[rank]]
        pair = order[rank][position[rank] + 1] if work.overlapped and times.overlap else None
        arrivals = [ready(one) for one in (work, pair) if one is not None]
        if any(arrival is None for arrival in arrivals):
            return False
        start = max(free[rank], *(arrival for arrival in arrivals if arrival is not None))
        lengths = [times.seconds(one, scales[one.micro_batch]) for one in (work, pair) if one is not None]
        end = start + sum(lengths) - (times.overlap * min(lengths) if pair else 0.0)
        for one in (work, pair):
            if one is not None:
                done[one.stage, "I" if one.kind == "B" else one.kind, one.micro_batch] = end
                spans[rank].append(Span(rank, one, start, end))
                position[rank] += 1
        free[rank] = end
        return True

    left = set(range(ranks))
    while left:
        moved = False
        for rank in sorted(left):
            while position[rank] < len(order[rank]) and advance(rank):
                moved = True
        left = {rank for rank in left if position[rank] < len(order[rank])}
        if left and not moved:
            stuck = order[min(left)][position[min(left)]]
            raise ConfigError(f"the order waits for itself: rank {min(left)} at {stuck}")
    flat = tuple(span for row in spans for span in row)
    return Timeline(flat, ranks, tuple(_peak(row, scales) for row in spans))


def _peak(spans: Sequence[Span], scales: Sequence[float]) -> float:
    """Activations alive at most: a stage's from the start of its forward to the end of the last part of its
    backward."""
    split = {(span.work.stage, span.work.micro_batch) for span in spans if span.work.kind == "W"}
    events: list[tuple[float, int, float]] = []
    for span in spans:
        scale, key = scales[span.work.micro_batch], (span.work.stage, span.work.micro_batch)
        if span.work.kind == "F":
            events.append((span.start, 1, scale))
        elif span.work.kind == "W" or key not in split:
            events.append((span.end, 0, -scale))  # at the same instant the end comes first
    alive = peak = 0.0
    for _, _, change in sorted(events):
        alive += change
        peak = max(peak, alive)
    return peak
