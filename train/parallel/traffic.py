"""What a profile says about communication: bytes and seconds of each kind, and how much of it hides behind arithmetic.

Collectives are gloo's own annotations on its threads, or NCCL's kernels on their stream; arithmetic is every operator
of the processor's other threads, or every other kernel. A step's small sums (counts, norms, flags) are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SMALL = 4096  # bytes; the loop's own sums have a few numbers
_REDUCTIONS = ("all_reduce", "allreduce", "reduce_scatter", "reducescatter", "all_to_all", "alltoall")
_BYTES = {
    "double": 8, "long int": 8, "int": 4, "float": 4, "c10::Half": 2, "c10::BFloat16": 2, "unsigned char": 1,
    "signed char": 1, "bool": 1, "Double": 8, "Long": 8, "Int": 4, "Float": 4, "Half": 2, "BFloat16": 2, "Byte": 1,
    "Char": 1, "Bool": 1,
}  # fmt: skip
Interval = tuple[float, float]


@dataclass(frozen=True)
class Collective:
    """One collective of a process: `size` bytes handed over, from `start` to `end` (seconds)."""

    name: str
    start: float
    end: float
    size: int

    @property
    def reduces(self) -> bool:
        """Whether it sums, or exchanges what is then summed: gradients, and activations under tensor parallelism."""
        return any(word in self.name.lower() for word in _REDUCTIONS)


@dataclass(frozen=True)
class Traffic:
    """The collectives of a profile of one process, and the intervals of its arithmetic."""

    collectives: tuple[Collective, ...]
    arithmetic: tuple[Interval, ...]

    @property
    def reductions(self) -> tuple[Collective, ...]:
        """Those that sum."""
        return tuple(one for one in self.collectives if one.reduces)

    @property
    def overlap(self) -> float | None:
        """Share of the reductions' time beside arithmetic; None without reductions."""
        busy = _union((one.start, one.end) for one in self.reductions)
        total = sum(end - start for start, end in busy)
        return _shared(busy, self.arithmetic) / total if total else None

    def bandwidth(self, processes: int) -> float | None:
        """Bytes/s on the wire of the reductions of 64 KiB and more among `processes`, as `all_reduce_bandwidth` counts;
        None without any."""
        large = [one for one in self.reductions if one.size >= 2**16]
        seconds = sum(one.end - one.start for one in large)
        return 2 * (processes - 1) / processes * sum(one.size for one in large) / seconds if seconds else None

    def lines(self, steps: int) -> list[str]:
        """For the user: each kind of collective, a step; then the overlap."""
        shown = []
        for name in sorted({one.name for one in self.collectives}):
            same = [one for one in self.collectives if one.name == name]
            seconds = sum(one.end - one.start for one in same)
            shown.append(
                f"{name}: {len(same) / steps:g} a step, {sum(one.size for one in same) / steps / 2**20:.2f} MiB, "
                f"{1000 * seconds / steps:.1f} ms"
            )
        if self.overlap is not None:
            shown.append(f"reductions: {self.overlap:.0%} of their time beside arithmetic")
        return shown


def read_trace(path: Path) -> Traffic:
    """The communication in a Chrome trace that torch's profiler wrote with shapes."""
    return traffic_of(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])


def traffic_of(events: Sequence[dict[str, Any]]) -> Traffic:
    """See `read_trace`; times of events are microseconds."""
    found: list[Collective] = []
    arithmetic: list[Interval] = []
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    for event in events:
        if event.get("ph") != "X":
            continue
        name, kind, arguments = event["name"], event.get("cat"), event.get("args", {})
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if name.startswith("gloo:"):
            found.append(Collective(name.removeprefix("gloo:"), start, end, _gloo_bytes(arguments)))
        elif kind == "kernel" and "nccl" in name.lower():
            label = arguments.get("Collective name", name)
            size = int(arguments.get("In msg nelems", 0)) * _BYTES.get(arguments.get("dtype", ""), 0)
            found.append(Collective(label, start, end, size))
        elif kind == "kernel" or (not on_gpu and kind == "cpu_op" and name.startswith("aten::")):
            arithmetic.append((start, end))
    large = tuple(one for one in found if one.size > _SMALL)
    return Traffic(large, tuple(_union(arithmetic)))


def _gloo_bytes(arguments: dict[str, Any]) -> int:
    dimensions, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
    return sum(math.prod(shape) * _BYTES.get(kind, 0) for shape, kind in zip(dimensions, types, strict=True))


def _union(intervals: Any) -> list[Interval]:
    """The same points, as intervals that lie apart and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _shared(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds in both; each is a union."""
    total, index = 0.0, 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        at = index
        while at < len(second) and second[at][0] < end:
            total += min(end, second[at][1]) - max(start, second[at][0])
            at += 1
    return total
