"""Pipelines that suit their machine: stages split by measured layer cost, micro-batches resized while training runs.

`StageClock` measures what each stage takes, `Balance` hands that to `plan.balancer` after every step. All processes
sum the times, so all decide alike. Sizes change between steps, never within one, and the loss is divided by the tokens
of the whole step, so an update does not depend on them.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from penjing.core.models.config import DecoderConfig
from penjing.core.progress import Progress
from penjing.train.parallel.config import ParallelConfig
from penjing.train.pipeline.balancer import MicroBatchBalancer, Observation
from penjing.train.pipeline.measure import measure_layers
from penjing.train.pipeline.split import equal_split, split_layers, stage_costs
from penjing.train.processes.devices import synchronize

_GAIN = 0.05  # of a step must be promised before sizes change: a change costs a pass to try shapes out


class StageClock:
    """Seconds of every piece of work of this process's stages since `reset`; on a GPU by its own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type != "cpu"
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self._pieces: dict[tuple[int, str], list[Any]] = defaultdict(list)

    @contextmanager
    def piece(self, stage: int, kind: str) -> Iterator[None]:
        """Measure what is done inside as a piece of `kind` ("F", "loss", "I" or "W") of `stage`."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._pieces[stage, kind].append(time.perf_counter() - began)
            return
        events = [torch.Event(self._device, enable_timing=True) for _ in range(2)]
        events[0].record()
        yield
        events[1].record()
        self._pieces[stage, kind].append(events)

    def seconds(self) -> dict[tuple[int, str], list[float]]:
        """By (stage, kind), in order."""
        if not self._on_gpu:
            return dict(self._pieces)
        synchronize(self._device)
        return {key: [a.elapsed_time(b) / 1000 for a, b in pairs] for key, pairs in self._pieces.items()}


class Balance:
    """Chooses the samples of a micro-batch for the next step from what the last one took.

    Attributes: values: for the record of a step: "micro_batch", and "bubble", the measured share of the processes' time
        in which no stage worked.
    """

    def __init__(self, config: ParallelConfig, device: torch.device, note: Callable[[str], None]) -> None:
        self.clock = StageClock(device)
        self.values: dict[str, float] = {}
        self._config = config
        self._device = device
        self._note = note
        self._balancer: MicroBatchBalancer | None = None
        self._size = 0
        self._is_new = True  # the first step of a size tries shapes out and is not typical

    def size(self, rows: int, largest: int) -> int:
        """Samples of a micro-batch in this step, whose passes have `rows` each.

        Raises:
            ConfigError: no size of `largest` or less works.
        """
        if self._balancer is None:
            self._balancer = MicroBatchBalancer(self._config.schedule, self._config.pp, rows, largest, gain=_GAIN)
            self._size = self._balancer.decide().size
        return self._size

    def after_step(self, began: float) -> None:
        """Take in the times of the step that began at `began` (perf_counter), and decide; all processes call it."""
        assert self._balancer is not None
        stages = self._config.num_stages
        pieces = self.clock.seconds()
        elapsed_s = time.perf_counter() - began
        self.clock.reset()
        typical = {key: statistics.median_low(seconds) for key, seconds in pieces.items()}
        # The last backward pass of a step may also reduce gradients, which low medians leave out.
        forward, backward = torch.zeros(2, stages, dtype=torch.float64)
        for (stage, kind), seconds in typical.items():
            (forward if kind in ("F", "loss") else backward)[stage] += seconds
        idle = 1 - sum(map(sum, pieces.values())) / elapsed_s
        everyone = torch.cat([forward, backward, torch.tensor([idle], dtype=torch.float64)]).to(self._device)
        dist.all_reduce(everyone)
        copies = dist.get_world_size() // self._config.pp  # processes with the same stage
        *times, idle = everyone.tolist()
        self.values = {"micro_batch": self._size, "bubble": idle / dist.get_world_size()}
        if self._is_new:
            self._is_new = False
            return
        means = tuple(seconds / copies for seconds in times)
        self._balancer = self._balancer.observe(Observation(self._size, means[:stages], means[stages:]))
        decision = self._balancer.decide()
        if decision.size != self._size:
            self._note(
                f"pipeline: micro-batches of {decision.size} samples instead of {self._size} from the next step "
                f"on: {decision.reason}"
            )
            self._size, self._is_new = decision.size, True


def split_by_cost(
    config: ParallelConfig, model: DecoderConfig, length: int, samples: int, device: torch.device, progress: Progress
) -> ParallelConfig:
    """`config` with parallel.stage_layers = "cost" replaced by the layers of each stage: the main process measures
    every kind of layer on `samples` sequences of `length` tokens, all processes call it."""
    layers, stages = model.num_hidden_layers, config.num_stages
    seconds = torch.zeros(layers, dtype=torch.float64, device=device)
    if dist.get_rank() == 0:
        forward, backward = measure_layers(model, length, samples, progress, device)
        seconds += torch.tensor([f + b for f, b in zip(forward, backward, strict=True)], dtype=torch.float64).to(device)
    dist.broadcast(seconds, 0)
    costs = seconds.tolist()
    bounds = split_layers(costs, stages)
    counts = tuple(after - before for before, after in pairwise(bounds))
    mean = sum(costs) / stages
    heaviest, equal = (max(stage_costs(costs, cut)) / mean for cut in (bounds, equal_split(layers, stages)))
    progress.note(
        f"stages by measured cost: {' + '.join(map(str, counts))} layers, the heaviest {heaviest:.2f} of the mean "
        f"({equal:.2f} with equally many)"
    )
    return config.model_copy(update={"stage_layers": counts})
