"""How the batch of a step is cut into micro-batches; of those that divide it and fit into memory, the one that trains
the most samples a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.progress import Progress, plural
from penjing.train.families.base import Task
from penjing.train.numerics.precision import Precision
from penjing.train.plan.estimate import MemoryEstimate, check_memory
from penjing.train.processes.devices import synchronize
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import RunRecipe

_TRIALS = 5  # sizes tried, from the largest that fits down
_TARGET_S = 2.0  # time given to one size


@dataclass(frozen=True)
class Cut:
    """`batch_size` samples of a step, shared by `shares` groups of processes in micro-batches of `micro_batch`."""

    batch_size: int
    shares: int
    micro_batch: int

    @property
    def accumulation(self) -> int:
        """Micro-batches of a group in a step."""
        return -(-self.batch_size // (self.micro_batch * self.shares))

    @property
    def filled(self) -> int:
        """Samples of a step with those that fill up the last micro-batches and do not count."""
        return self.accumulation * self.micro_batch * self.shares

    def __str__(self) -> str:
        empty = self.filled - self.batch_size
        return (
            f"batch {self.batch_size} = {self.shares} × {self.micro_batch} × {self.accumulation} accumulated"
            f"{f' less {empty}' if empty else ''}"
        )

    def check(self) -> Cut:
        """This cut, if nothing has to be filled up.

        Raises:
            ConfigError: the batch is not a multiple; names one that is.
        """
        if self.filled != self.batch_size:
            step = self.micro_batch * self.shares
            raise ConfigError(
                f"data.batch_size={self.batch_size} is not a multiple of data.micro_batch={self.micro_batch} × "
                f"{plural(self.shares, 'process', 'processes')}; take {step * max(round(self.batch_size / step), 1)}"
            )
        return self


def check_shares(batch_size: int, shares: int, processes: int) -> None:
    """Refuse a batch that `shares` groups of `processes` cannot share evenly.

    Raises:
        ConfigError: names one that they can.
    """
    if batch_size % shares:
        sharing = f"{shares} processes" if shares == processes else f"{shares} groups of processes (parallel.dp)"
        raise ConfigError(
            f"data.batch_size={batch_size} is not a multiple of the {sharing}; "
            f"take {batch_size // shares * shares or shares}"
        )


def repeats(batch_size: int, num_samples: int | None) -> str:
    """What to tell of a batch that holds every sample of the data more than once; empty where it does not, or where a
    stream does not know its samples."""
    if num_samples is None or batch_size <= num_samples:
        return ""
    return (
        f"data.batch_size={batch_size} is more than the {num_samples:,} samples that there are: every update sees each "
        f"of them {batch_size / num_samples:.3g} times, which costs time and teaches no more; lower data.batch_size to "
        f"{num_samples} or less, or give more data"
    )


def recut(batch_size: int, shares: int, largest: int, multiple: int = 1) -> Cut:
    """The cut of a resumed run, whose batch stays what it was, whatever the number of processes.

    Args:
        largest: the micro-batch of the run so far; smaller ones are taken where it does not divide a share.
        multiple: of which the micro-batches of a step should be one.
    """
    share = -(-batch_size // shares)
    fitting = (size for size in range(min(largest, share), 0, -1) if -(-share // size) % multiple == 0)
    passes = -(-share // next(fitting, 1))
    return Cut(batch_size, shares, -(-share // passes))


def fastest_micro_batch(
    task: Task,
    build_model: Callable[[], nn.Module],
    estimate: Callable[[int], MemoryEstimate],
    share: int,
    limit: int,
    recipe: RunRecipe,
    world: World,
    progress: Progress,
) -> int:
    """The micro-batch for a process whose share of the batch is `share` samples; the same in every process.

    Args:
        estimate: memory of a micro-batch; sizes over `limit` bytes are not tried.

    Raises:
        ConfigError: not even one sample fits.
    """
    sizes = [size for size in range(share, 0, -1) if share % size == 0]
    fitting = [size for size in sizes if estimate(size).total <= limit][:_TRIALS]
    if not fitting:
        check_memory(estimate(1), limit)
    rates = torch.zeros(len(fitting), dtype=torch.float64)
    model = build_model()
    task.initialize(model)
    model = model.to(world.device)
    Precision(model, recipe.precision, world.device)
    for index, size in enumerate(fitting):
        rates[index] = _samples_per_s(model, task, size, world)
    del model
    world.sum(rates)
    best = fitting[int(rates.argmax())]
    tried = ", ".join(f"{size}: {rate / world.size:,.1f}/s" for size, rate in zip(fitting, rates.tolist(), strict=True))
    progress.note(f"micro-batch {best} (samples/s of one process: {tried})")
    return best


def _samples_per_s(model: nn.Module, task: Task, size: int, world: World) -> float:
    """Forward and backward passes of `size` samples a second; 0 where memory does not suffice after all."""
    batch = {name: tensor.to(world.device) for name, tensor in task.example(size).items()}
    times: list[float] = []
    try:
        while len(times) < 2 or (sum(times) < _TARGET_S and len(times) < 10):
            began = time.perf_counter()
            task.objective(model, batch).total.backward()
            synchronize(world.device)
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        model.zero_grad(set_to_none=True)
    return size / min(times[1:])
