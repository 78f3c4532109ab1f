"""How fast the processes that share gradients can all-reduce, with nothing else to do."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from penjing.train.parallel.mesh import MeshWorld
from penjing.train.processes.devices import synchronize
from penjing.train.processes.world import World

_SIZES = (2**16, 2**20, 2**24)  # bytes
_RUNS = 5


def gradient_group(world: World) -> tuple[dist.ProcessGroup | None, int]:
    """The processes among which this one's gradients are summed, and how many they are."""
    if not isinstance(world, MeshWorld):
        return None, world.size
    group = world.mesh.get_group("shard" if world.config.zero else "replicate")
    return group, dist.get_world_size(group)


def all_reduce_bandwidth(world: World) -> dict[int, float]:
    """Bytes of a float32 message → bytes/s on the wire of each process: 2 (n − 1) / n × bytes ÷ seconds of the slowest
    process, the median of five. Empty where gradients are not shared. All processes call it."""
    group, size = gradient_group(world)
    if size == 1:
        return {}
    found = {}
    for message in _SIZES:
        values = torch.zeros(message // 4, device=world.device)
        dist.all_reduce(values, group=group)
        taken = []
        for _ in range(_RUNS):
            dist.barrier(group)
            began = time.perf_counter()
            dist.all_reduce(values, group=group)
            synchronize(world.device)
            taken.append(time.perf_counter() - began)
        slowest = torch.tensor(statistics.median(taken), dtype=torch.float64, device=world.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        found[message] = 2 * (size - 1) / size * message / float(slowest)
    return found
