"""Finds a micro-batch: of those that divide the batch and fit into memory, the one that trains the most samples a
second."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from penjing.core.progress import Progress
from penjing.train.memory import MemoryEstimate, check_memory
from penjing.train.precision import Precision
from penjing.train.recipe import RunRecipe
from penjing.train.tasks import Task
from penjing.train.world import World

_TRIALS = 5  # sizes tried, from the largest that fits down
_TARGET_S = 2.0  # time given to one size


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
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError:
        return 0.0
    finally:
        model.zero_grad(set_to_none=True)
    return size / min(times[1:])
