"""Processes of unlike speed get unlike numbers of a step's micro-batches: `parallel.shares = "auto"`.

Micro-batches keep their size, and a step its samples; only who computes what changes, between steps. The loss is
divided by the terms of the whole step and gradients are summed, so an update stays what it is, but for the order of
sums and for the dice of dropout, which belong to processes.

What a process takes is measured without waiting for others: the last micro-batch of a step, whose backward pass also
reduces gradients, counts by its forward pass alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from penjing.core.errors import ConfigError
from penjing.train.data.prefetch import Prefetched
from penjing.train.data.stream import OrderedStream
from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.share_balancer import ShareBalancer
from penjing.train.pipeline.balance import StageClock
from penjing.train.processes.world import World


class Shares:
    """The shares of a run in `world`, whose `stream` they move.

    Args:
        batch_size, micro_batch: samples of a step, and of one micro-batch.
        note: shows a line to the user.
        clock: measures; by default the device's.

    Raises:
        ConfigError: a stream that hands out its samples otherwise.
    """

    def __init__(
        self,
        world: World,
        stream: Prefetched,
        batch_size: int,
        micro_batch: int,
        note: Callable[[str], None],
        *,
        clock: StageClock | None = None,
        gain: float = 0.05,
    ) -> None:
        self._world, self._stream, self._note = world, stream, note
        self._clock = clock or StageClock(world.device)
        total = max(-(-batch_size // micro_batch), world.size)
        even = tuple(total // world.size + (rank < total % world.size) for rank in range(world.size))
        self._micro_batch = micro_batch
        self._balancer = ShareBalancer(even, gain)
        # Of each process, a micro-batch's seconds over those of its forward pass; a backward pass does twice the work.
        self._factors = [3.0] * world.size
        self._is_new = True  # the first step compiles, fills caches and is not typical
        self._move(even)

    @property
    def own(self) -> int:
        """Micro-batches of this process in the next step."""
        return self._balancer.counts[self._world.rank]

    def forward(self) -> AbstractContextManager[None]:
        """Inside it: a micro-batch's forward pass."""
        return self._clock.piece(0, "forward")

    def whole(self, last: bool) -> AbstractContextManager[None]:
        """Inside it: a micro-batch; `last`: it also waits for other processes."""
        return self._clock.piece(0, "last" if last else "whole")

    def after_step(self) -> dict[str, float]:
        """Take in the times of a step, and decide; all processes call it, at its end. Values for its record."""
        pieces = self._clock.seconds()
        self._clock.reset()
        ran = self._balancer
        times = torch.zeros(2, self._world.size, dtype=torch.float64)
        own = self._measure(pieces.get((0, "forward"), []), pieces.get((0, "whole"), []))
        times[:, self._world.rank] = torch.tensor(own, dtype=torch.float64)
        seconds, self._factors = self._world.sum(times).tolist()
        if not self._is_new:
            self._balancer = ran = ran.observe(seconds)
            if (counts := ran.decide()) != ran.counts:
                self._balancer = replace(ran, counts=counts)
                samples = [count * self._micro_batch for count in counts]
                self._note(
                    f"shares: the processes take {' + '.join(map(str, samples))} samples from the next step on; "
                    f"{ran.idle:.0%} of their time was spent waiting, {self._balancer.idle:.0%} is expected"
                )
                self._move(counts)
        self._is_new = False
        return {
            "share_largest": max(ran.counts) * self._micro_batch,
            "share_smallest": min(ran.counts) * self._micro_batch,
            "share_idle": ran.idle,
        }

    def _measure(self, forward: list[float], whole: list[float]) -> tuple[float, float]:
        """Seconds of a micro-batch here, and what they are to those of its forward pass."""
        if whole:
            typical = statistics.median_low(whole)
            return typical, typical / max(statistics.median_low(forward[: len(whole)]), 1e-9)
        factor = self._factors[self._world.rank]
        return statistics.median_low(forward) * factor, factor

    def _move(self, counts: tuple[int, ...]) -> None:
        def move(stream: Any) -> None:
            if not isinstance(stream, OrderedStream):
                raise ConfigError(
                    "parallel.shares = 'auto' hands out samples by their numbers, and these data have none; set it to "
                    "'equal'"
                )
            stream.order.turns.counts = counts

        self._stream.change(move)

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on in as many processes begins with, the same in all of them."""
        seen = [list(seconds) for seconds in self._balancer.seen]
        return {"counts": list(self._balancer.counts), "seen": seen, "factors": self._factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`; with other processes or micro-batches the shares stay even, and are measured anew."""
        counts = tuple(map(int, state["counts"]))
        if len(counts) == self._world.size and sum(counts) == sum(self._balancer.counts):
            seen = tuple(tuple(map(float, seconds)) for seconds in state["seen"])
            self._balancer = replace(self._balancer, counts=counts, seen=seen)
            self._factors = list(map(float, state["factors"]))
            self._move(counts)


def unlike_shares(
    config: ParallelConfig,
    world: World,
    stream: Prefetched,
    batch_size: int,
    micro_batch: int,
    note: Callable[[str], None],
) -> Shares | None:
    """The shares that `config` asks for; None where all processes have the same.

    Raises:
        ConfigError: see `Shares`.
    """
    if config.shares == "equal" or world.size == 1:
        return None
    return Shares(world, stream, batch_size, micro_batch, note)
