"""Everything that [parallel] does to a model, in order: the model itself knows one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress
from penjing.train.memory import MemoryEstimate
from penjing.train.parallel.config import ParallelConfig, check_parallel
from penjing.train.parallel.context import Context
from penjing.train.parallel.mesh import MeshWorld, build_mesh, describe
from penjing.train.parallel.pipeline import LocalStages, Pipeline, split_stages, sum_tied
from penjing.train.parallel.shard import apply_fsdp
from penjing.train.parallel.tensor import apply_tensor_parallel, sum_partial
from penjing.train.precision import GROUPS
from penjing.train.recipe import RunRecipe
from penjing.train.state import model_state
from penjing.train.world import World


@dataclass(frozen=True)
class Parallelized:
    """A model spread over a mesh, as the loop wants it.

    Attributes: model: what this process trains. pipeline, after_backward: see `Trainer`.
    """

    model: nn.Module
    pipeline: Pipeline | None = None
    after_backward: tuple[Callable[[], None], ...] = ()


def check_recipe(recipe: RunRecipe, world_size: int) -> None:
    """Refuse a recipe whose [parallel] does not fit its model, or `world_size` processes.

    Raises:
        ConfigError: see `check_parallel`.
    """
    if recipe.parallel == ParallelConfig():
        return
    length = getattr(recipe.data, "sequence_length", None)
    check_parallel(recipe.parallel, getattr(recipe, "model", None), world_size, length, recipe.compile)
    if recipe.parallel.cp > 1 and getattr(recipe.data, "document_mask", False):
        raise ConfigError("data.document_mask = true is not for parallel.cp above 1; set one of them back")
    groups = ", ".join(GROUPS)
    if recipe.parallel.pp > 1 and any(rule.match not in GROUPS for rule in recipe.precision.policy):
        raise ConfigError(f"precision.policy with parallel.pp above 1 takes groups only, no module names: {groups}")
    if (
        recipe.parallel.pp > 1
        and recipe.parallel.schedule in ("zbv", "dualpipev")
        and recipe.memory.recompute != "none"
    ):
        raise ConfigError(
            f"parallel.schedule = {recipe.parallel.schedule!r} splits the backward pass, and would recompute twice; "
            "set memory.recompute = 'none', or use '1f1b' or 'interleaved'"
        )
    if not recipe.parallel.is_plain and recipe.data.micro_batch == "auto":
        raise ConfigError("data.micro_batch = 'auto' is measured on a whole model; give a number with this [parallel]")


def form_mesh(world: World, config: ParallelConfig, progress: Progress) -> World:
    """`world` as the mesh that `config` asks for; as it is when that is data parallelism alone."""
    if config.is_plain or world.size == 1:
        return replace(world, gradients=config.gradients)
    mesh = build_mesh(world, config)
    progress.note(describe(mesh))
    return mesh


def parallelize(model: nn.Module, world: World) -> Parallelized:
    """Spread `model`, the same in every process, over the mesh of `world`, if it is one; recomputation is applied
    before, precision and optimisers come after."""
    if not isinstance(world, MeshWorld):
        return Parallelized(model)
    config, mesh = world.config, world.mesh
    after: list[Callable[[], None]] = []
    rank = mesh.get_local_rank("pipeline")
    if config.pp > 1:
        assert isinstance(model, Decoder)
        model = split_stages(model, config, rank, world.context)
    elif (context := world.context) is not None:
        assert isinstance(model, Decoder)
        model.register_forward_pre_hook(functools.partial(_in_context, context), with_kwargs=True)
    if config.tp > 1:
        partial = apply_tensor_parallel(model, mesh["tensor"], sequence=config.sequence)
        after.append(functools.partial(sum_partial, model, partial, mesh.get_group("tensor")))
    apply_fsdp(model, world.fsdp, config.zero, packed=config.gradients == "int8")
    if not isinstance(model, LocalStages):
        return Parallelized(model, after_backward=tuple(after))
    if (tied := _tied_group(world)) is not None and model.parts[0].config.tie_word_embeddings:  # type: ignore[union-attr]
        after.append(functools.partial(sum_tied, model, tied))
    return Parallelized(model, Pipeline(model, config, rank, mesh.get_group("pipeline"), world.device), tuple(after))


def _in_context(context: Context, model: Decoder, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What a decoder is called with, and where its stretch of the sequence lies."""
    rows, length = args[0].shape
    positions = context.positions(rows, length, args[0].device)
    return args, kwargs | {"positions": positions, "attend": context.attention(model.config)}


def _tied_group(world: MeshWorld) -> dist.ProcessGroup | None:
    """The processes of this one's pipeline with the first and the last stage, if it is one of them; all call it."""
    config = world.config
    ends = sorted({config.owner(0), config.owner(config.num_stages - 1)})
    pipelines = world.mesh.mesh.flatten(1)  # (pipeline, everything else)
    own = None
    for column in range(pipelines.shape[1]):
        ranks = [int(pipelines[end, column]) for end in ends]
        group = dist.new_group(ranks)
        if world.rank in ranks:
            own = group
    assert not isinstance(own, int)
    return own


@torch.no_grad()
def gather(model: nn.Module, world: MeshWorld, build: Callable[[], nn.Module] | None) -> nn.Module:
    """The whole model in the main process, which alone gives `build`, a tensor at a time; all processes call it.

    Returns:
        The built model with the weights of `model`; in the other processes `model`.
    """
    whole = None if build is None else build()
    wanted = {} if whole is None else model_state(whole)
    ranks = world.mesh.mesh
    stage, stages = world.mesh.get_local_rank("pipeline"), ranks.shape[0]
    here = model_state(model)
    for source in range(stages):
        # What the stage has, by all of its processes; its first hands it to the main process.
        first = int(ranks[source].flatten()[0])
        names: list[Any] = [list(here)]
        if stages > 1:
            dist.broadcast_object_list(names, src=first)
        for name in names[0]:
            full = torch.empty(0)
            if source == stage:
                full = here[name]
                full = full.full_tensor() if isinstance(full, DTensor) else full
                if world.rank == first != 0:
                    dist.send(full.cpu(), 0)
            if whole is not None:
                if first != 0:
                    dist.recv(full := torch.empty_like(wanted[name]), first)
                wanted[name].copy_(full)
    return model if whole is None else whole


def share_of(estimate: MemoryEstimate, world: World) -> MemoryEstimate:
    """What is left of a whole model's `estimate` for one process of the mesh.

    Layers are taken as equal. A stage of a pipeline keeps the activations of as many micro-batches as it has stages
    after it, itself included: the first, which this is, of all.
    """
    if not isinstance(world, MeshWorld):
        return estimate
    config, data = world.config, world.data.size * world.config.cp
    parts = config.tp * config.pp

    def spread(size: int, from_zero: int) -> int:
        return -(-size // (parts * (data if config.zero >= from_zero else 1)))

    return MemoryEstimate(
        parameters=spread(estimate.parameters, 3),
        gradients=spread(estimate.gradients, 2),
        optimizer=spread(estimate.optimizer, 1),
        average=spread(estimate.average, 1),
        reduction=spread(estimate.reduction, 4),
        activations=-(-estimate.activations // (config.tp * config.cp)),
    )
