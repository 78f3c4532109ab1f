"""The processes of a run as a grid, and the grid as the loop's `World`.

Ranks count tensor parallelism fastest, then context, pipeline, data: what talks most sits closest. Tensor parallelism
exchanges activations twice a layer, context parallelism keys and values once a layer, a pipeline activations between
two layers, and data parallelism gradients once a step, behind the backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.context import Context
from penjing.train.processes.world import World

# Outermost first. FSDP shards over "shard", copies over "replicate"; either is 1.
DIMENSIONS = ("pipeline", "replicate", "shard", "context", "tensor")
_INNER = ("pipeline", "context", "tensor")


@dataclass(frozen=True)
class MeshWorld(World):
    """The `World` of a run whose processes share more than the batch; every process has the whole mesh.

    Attributes: mesh: of `DIMENSIONS`. config: what it was made from. fsdp: (shards) or (copies, shards).
        tokens: the processes with the same layers and other tokens; None: all.
        copies: where fsdp is this process alone, the processes with the same of the model: their gradients are packed,
            which FSDP's own all-reduce cannot do.
        experts: the same processes with data parallelism cut in two, ("outer", "expert"); None when not spread.
        expert_fsdp: as fsdp, for the experts of this process.
    """

    mesh: DeviceMesh = None  # type: ignore[assignment]  # the fields before it have defaults
    config: ParallelConfig = field(default_factory=ParallelConfig)
    fsdp: DeviceMesh = None  # type: ignore[assignment]
    tokens: dist.ProcessGroup | None = None
    copies: dist.ProcessGroup | None = None
    experts: DeviceMesh | None = None
    expert_fsdp: DeviceMesh | None = None

    @property
    def data(self) -> World:
        """Which share of the batch is this process's; processes that share a sample have the same, and sums are over
        one of each."""
        size = self._size("replicate") * self._size("shard")
        rank = self._rank("replicate") * self._size("shard") + self._rank("shard")
        return World(rank, size, self.device, group=self.tokens)

    @property
    def speaks(self) -> bool:
        """True in one process for each share of the tokens: the one whose loss counts."""
        last = self.config.owner(self.config.num_stages - 1)
        return self._rank("tensor") == 0 and self._rank("pipeline") == last

    def sum_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """See `World`."""
        if self.tokens is None:
            return self.sum(values)
        dist.all_reduce(values, group=self.tokens)
        return values

    @property
    def saves(self) -> bool:
        """See `World`."""
        return self.copies is None or self.copies.rank() == 0

    def average_buffers(self, model: nn.Module) -> None:
        """See `World`; decoders have no statistics, and their stages no common buffers."""
        if self.config.tp * self.config.pp * self.config.cp == 1:
            super().average_buffers(model)

    def global_norm(self, model: nn.Module) -> torch.Tensor:
        """See `World`: each process adds the squares of what it holds, over the number of processes that hold it."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        stages = self._size("pipeline")
        repeated: frozenset[str] = getattr(model, "repeated", frozenset())
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            if gradient is None or name in repeated:
                continue
            parts, shard = 1, gradient  # of how many the whole gradient consists
            if isinstance(gradient, DTensor):
                shard = gradient.to_local()
                for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
                    assert not placement.is_partial(), "a gradient was not reduced"
                    parts *= 1 if placement.is_replicate() else size
                parts *= self.config.ep if _is_of_experts(gradient.device_mesh) else 1
            # float32 norm of a shard, then float64 between shards: as good as torch's norm of norms
            norm = torch.linalg.vector_norm(shard, dtype=torch.promote_types(shard.dtype, torch.float32))
            total += norm.to(torch.float64).square() * (parts * stages / self.size)
        return self.sum(total).sqrt()

    @property
    def context(self) -> Context | None:
        """This process's stretch of each sequence; None: all of it."""
        if self.config.cp == 1:
            return None
        return Context(self._rank("context"), self.config.cp, self.mesh.get_group("context"))

    def part(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `World`: the stretch of context parallelism."""
        return batch if self.context is None else self.context.part(batch)

    def reshard(self, model: nn.Module) -> None:
        """See `World`: without it the parameters seen from outside would be the gathered ones."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def replicate(self, model: nn.Module) -> nn.Module:
        """See `World`; FSDP has made the replica already."""
        return model

    def reducing(self, replica: nn.Module, now: bool) -> AbstractContextManager[None]:
        """See `World`. With parallel.zero of 2 and 3 every micro-batch reduces, so that no process keeps a whole
        gradient; between copies of the shards only the last does."""
        return self._reducing(replica, now) if isinstance(replica, FSDPModule) else nullcontext()

    @contextmanager
    def _reducing(self, replica: FSDPModule, now: bool) -> Iterator[None]:
        replica.set_requires_gradient_sync(now or self.config.zero >= 2)
        replica.set_requires_all_reduce(now)
        yield

    def _size(self, name: str) -> int:
        return self.mesh.size(DIMENSIONS.index(name))

    def _rank(self, name: str) -> int:
        return self.mesh.get_local_rank(name)


def build_mesh(world: World, config: ParallelConfig) -> MeshWorld:
    """The grid of `config` over the processes of `world`; all processes call it.

    Raises:
        ConfigError: see `ParallelConfig.data_size`.
    """
    dp = config.data_size(world.size)
    shard = config.spread(dp)
    replicate = dp // shard
    ranks = torch.arange(world.size).view(replicate, shard, config.pp, config.cp, config.tp).permute(2, 0, 1, 3, 4)
    mesh = DeviceMesh(world.device.type, ranks.contiguous(), mesh_dim_names=DIMENSIONS)
    fsdp, copies = _fsdp_mesh(mesh, "shard" if config.zero else "replicate", config), None
    if 1 < shard < dp:
        # By name, torch 2.13 slices a flattened dimension with a warning that it will not.
        fsdp = mesh["replicate", "shard"] if config.cp == 1 else DeviceMesh._concatenate([mesh["replicate"], fsdp])
    if config.zero == 0 and config.gradients == "int8":
        fsdp, copies = mesh["shard"], mesh["replicate", "context"]._flatten("copies").get_group()
    tokens = None
    if config.pp * config.tp > 1:
        tokens = mesh["replicate", "shard", "context"]._flatten("tokens").get_group()
    experts = expert_fsdp = None
    if config.ep > 1:
        ranks = torch.arange(world.size).view(dp // config.ep, config.ep, config.pp, config.cp, config.tp)
        experts = DeviceMesh(world.device.type, ranks, mesh_dim_names=("outer", "expert", *_INNER))
        expert_fsdp = _fsdp_mesh(experts, "outer", config)
    return MeshWorld(
        world.rank, world.size, world.device, config.gradients, world.watch, mesh=mesh, config=config, fsdp=fsdp,
        tokens=tokens, copies=copies, experts=experts, expert_fsdp=expert_fsdp,
    )  # fmt: skip


def _is_of_experts(mesh: DeviceMesh) -> bool:
    return any(name.startswith("outer") for name in mesh.mesh_dim_names or ())


def _fsdp_mesh(mesh: DeviceMesh, data: str, config: ParallelConfig) -> DeviceMesh:
    """Processes of one context see other tokens with the same weights: to FSDP they are data parallel too."""
    if config.zero == 0:
        return mesh[data, "context"]
    return mesh[data] if config.cp == 1 else mesh[data, "context"]._flatten(f"{data}_context")


def describe(world: MeshWorld) -> str:
    """One line: the mesh, who sits next to whom, and why."""
    config, dp = world.config, world.data.size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world.size)))
    inside = [name for name, reach in (
        ("tensor", config.tp),
        ("context", config.tp * config.cp),
        ("pipeline", config.tp * config.cp * config.pp),
        ("data", world.size),
    ) if local % reach == 0 or (reach <= local and world.size <= local)]  # fmt: skip
    names = ", ".join(inside) or "nothing"
    return (
        f"mesh: data {dp} × pipeline {config.pp} × context {config.cp} × tensor {config.tp}, ZeRO {config.zero}"
        f"{f' over {config.shards} of them, in copies' if config.shards else ''}"
        f"{f', experts over {config.ep}' if config.ep > 1 else ''}; neighbouring ranks share tensors first, then "
        f"context, pipeline, data, since they talk most in that order; inside a node of {local}: {names}"
    )
