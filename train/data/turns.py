"""Which of a step's micro-batches a process computes: every n-th, or a stretch of its own length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Turns:
    """The turns of process `rank` of `world_size` in a step of `batch_size` samples.

    Attributes:
        micro_batch: samples of one micro-batch of one process.
        counts: micro-batches of each process, together at least those of the step; None: each takes every
            `world_size`-th, and all take equally many.
    """

    batch_size: int
    micro_batch: int
    rank: int = 0
    world_size: int = 1
    counts: tuple[int, ...] | None = None

    @property
    def own(self) -> int:
        """Micro-batches of this process in a step."""
        if self.counts is not None:
            return self.counts[self.rank]
        return -(-self.batch_size // (self.micro_batch * self.world_size))

    def begin(self, part: int) -> int:
        """Where in the step this process's micro-batch number `part` begins; samples from `batch_size` on fill it up,
        and do not count."""
        before = part * self.world_size + self.rank if self.counts is None else sum(self.counts[: self.rank]) + part
        return before * self.micro_batch
