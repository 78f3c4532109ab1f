"""The processes of a run: who this one is, small sums and maxima over all, and the replicas of a model.

`World()` is one process and costs nothing. `join_world()` reads what torchrun set in the environment. A mesh with
more dimensions than data parallelism offers the same methods; the loop asks for nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from penjing.core.errors import SetupError
from penjing.train.numerics.gradients import global_norm, gradients_of
from penjing.train.processes.compressed import compress_ddp
from penjing.train.processes.devices import backends, choose_device
from penjing.train.processes.watch import WORK_FACTOR, Watch


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes that each see their own share of a batch, on `device`."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    gradients: str = "float32"  # how they travel: see compressed.py
    watch: Watch | None = field(default=None, compare=False)
    group: dist.ProcessGroup | None = field(default=None, compare=False)  # None: all processes

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def data(self) -> World:
        """Which share of the batch is this process's: a world of as many as there are shares."""
        return self

    @property
    def speaks(self) -> bool:
        """True in one of the processes that see the same tokens: the one whose sums count."""
        return True

    @property
    def saves(self) -> bool:
        """Whether this process's tensors belong into a checkpoint that many write: False in one that holds the same as
        another, where the tensors do not say so (a DTensor does)."""
        return True

    def global_norm(self, model: nn.Module) -> torch.Tensor:
        """Euclidean norm of the whole gradient of `model`; NaN or infinite as soon as one element is."""
        return global_norm(gradients_of(model.parameters()))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.SUM, group=self.group)
        return values

    def sum_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the processes that have the same layers and see other tokens, in place."""
        return self.sum(values)

    def part(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this process computes of a micro-batch of its share: all of it."""
        return batch

    def reshard(self, model: nn.Module) -> None:
        """Let go of what a forward pass without a backward pass has gathered of `model`."""

    def at(self, doing: str, *, everywhere: bool = True) -> None:
        """Tell the watch over a run's processes what this one begins: see `Watch.at`."""
        if self.watch is not None:
            self.watch.at(doing, everywhere=everywhere)

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Give the floating-point buffers of `model`, such as running statistics, their mean over all processes."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if self.size == 1 or not buffers:
            return
        means = self.sum(torch.cat([buffer.flatten().to(torch.float32) for buffer in buffers])) / self.size
        for buffer, mean in zip(buffers, means.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view_as(buffer))

    def replicate(self, model: nn.Module) -> nn.Module:
        """What the objective calls: `model` itself, or a replica whose backward *sums* gradients over the world.

        Gradients are summed, not averaged: the loop divides the loss by the token count of the whole world, so that
        every token weighs the same whichever process saw it.
        """
        if self.size == 1:
            return model
        devices = [self.device] if self.device.type != "cpu" else None
        # torch 2.13 would have it called forward_sync_buffers, which 2.11 does not know.
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        replica = DistributedDataParallel(model, devices, broadcast_buffers=False)  # see average_buffers
        if self.gradients == "float32":
            replica.register_comm_hook(None, _sum_bucket)
        else:
            compress_ddp(replica, self.gradients)
        return replica

    def reducing(self, replica: nn.Module, now: bool) -> AbstractContextManager[None]:
        """A context for one micro-batch: gradients are reduced in its backward only when `now`, the last of a step."""
        if now or not isinstance(replica, DistributedDataParallel):
            return nullcontext()
        return replica.no_sync()


# Without annotations: torch compares them with its classes, and postponed ones are strings.
def _sum_bucket(state, bucket):
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.SUM, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


@contextmanager
def join_world(device: str = "auto", watch: Watch | None = None) -> Iterator[World]:
    """Join the processes of `watch` (one process without it); leave them at the end.

    Args:
        device: see `choose_device`.

    Raises:
        ConfigError: see `choose_device`.
        SetupError: the processes do not reach each other.
    """
    chosen = choose_device(device)
    if chosen.type != "cpu":
        torch.accelerator.set_device_index(chosen)
    if watch is None:
        yield World(device=chosen)
        return
    watch.meet()
    rank, size = watch.rank, watch.size
    try:
        dist.init_process_group(
            backends(chosen),
            store=watch.group_store(),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=WORK_FACTOR * watch.timeout_s),  # the watch is quicker, and says more
        )
    except (dist.DistError, ValueError, RuntimeError) as error:
        raise SetupError(
            f"rank {rank} of {size} cannot join the others: {error}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose "
            "the network interface"
        ) from error
    yield World(rank, size, chosen, watch=watch)
    dist.destroy_process_group()  # not after an error: the others may never come
