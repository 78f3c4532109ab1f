"""Everything that [parallel] does to a model, in order: the model itself knows one device."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.progress import Progress
from penjing.train.parallel.config import ParallelConfig
from penjing.train.parallel.context import Context
from penjing.train.parallel.experts import apply_expert_parallel
from penjing.train.parallel.mesh import MeshWorld, build_mesh, describe
from penjing.train.parallel.shard import apply_fsdp
from penjing.train.parallel.tensor import apply_tensor_parallel, sum_partial
from penjing.train.pipeline.balance import Balance, split_by_cost
from penjing.train.processes.world import World
from penjing.train.recipe.data import TextData
from penjing.train.recipe.recipe import RunRecipe
from penjing.train.state.state import model_state

if TYPE_CHECKING:
    from penjing.train.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Parallelized:
    """A model spread over a mesh, as the loop wants it.

    Attributes: model: what this process trains. num_parameters: of the whole model. pipeline, after_backward: see
        `Trainer`.
    """

    model: nn.Module
    num_parameters: int
    pipeline: Pipeline | None = None
    after_backward: tuple[Callable[[], None], ...] = ()


def measured(recipe: RunRecipe, world: World, progress: Progress) -> ParallelConfig:
    """The recipe's [parallel] with what it leaves to a measurement; all processes call it."""
    config = recipe.parallel
    if config.stage_layers != "cost":
        return config
    model, data = getattr(recipe, "model", None), recipe.data
    assert isinstance(model, DecoderConfig), "check_recipe refuses others"
    assert isinstance(data, TextData)
    share = data.batch_size // config.data_size(world.size)
    samples = config.default_micro_batch(share) if data.micro_batch is None else int(data.micro_batch)
    return split_by_cost(config, model, data.sequence_length, samples, world.device, progress)


def form_mesh(world: World, config: ParallelConfig, progress: Progress) -> World:
    """`world` as the mesh that `config` asks for; as it is when that is data parallelism alone."""
    if config.is_plain or world.size == 1:
        return replace(world, gradients=config.gradients)
    mesh = build_mesh(world, config)
    progress.note(describe(mesh))
    return mesh


def parallelize(model: nn.Module, world: World, note: Callable[[str], None] = lambda line: None) -> Parallelized:
    """Spread `model`, the same in every process, over the mesh of `world`, if it is one; recomputation is applied
    before, precision and optimisers come after. Parameters may be without data (see initial.py). `note` shows a line to
    the user."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if not isinstance(world, MeshWorld):
        return Parallelized(model, num_parameters)
    # Not at the top: torch.distributed.pipelining imports the whole compiler, which one process has no use for.
    from penjing.train.pipeline.pipeline import LocalStages, Pipeline, split_stages, sum_tied

    config, mesh = world.config, world.mesh
    after: list[Callable[[], None]] = []
    rank = mesh.get_local_rank("pipeline")
    if config.pp > 1:
        assert isinstance(model, Decoder)
        model = split_stages(model, config, rank, world.context)
    elif (context := world.context) is not None:
        assert isinstance(model, Decoder)
        model.register_forward_pre_hook(functools.partial(_in_context, context), with_kwargs=True)
    if world.experts is not None:
        apply_expert_parallel(
            model, world.experts.get_local_rank("expert"), config.ep, world.experts.get_group("expert")
        )
    if config.tp > 1:
        experts = None if world.experts is None else world.experts["tensor"]
        partial, repeated = apply_tensor_parallel(model, mesh["tensor"], sequence=config.sequence, experts=experts)
        after.append(functools.partial(sum_partial, model, partial, mesh.get_group("tensor")))
        if config.gradients == "int8":  # rounded beside other values in each, what all have would drift apart
            after.append(functools.partial(sum_partial, model, repeated, mesh.get_group("tensor"), 1 / config.tp))
    packed = config.gradients == "int8"
    apply_fsdp(model, world.fsdp, config.zero, experts=world.expert_fsdp, packed=packed, copies=world.copies)
    if not isinstance(model, LocalStages):
        return Parallelized(model, num_parameters, after_backward=tuple(after))
    if (tied := _tied_group(world)) is not None and model.parts[0].config.tie_word_embeddings:  # type: ignore[union-attr]
        after.append(functools.partial(sum_tied, model, tied))
    balance = Balance(config, world.device, note) if config.balance else None
    pipeline = Pipeline(model, config, rank, mesh.get_group("pipeline"), world.device, balance)
    return Parallelized(model, num_parameters, pipeline, tuple(after))


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
    # It warns that gathering over two dimensions is slow, in every process: this happens once.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    config = world.config
    ranks = world.mesh.mesh.flatten(1)  # (pipeline, everything else)
    stage, stages = world.mesh.get_local_rank("pipeline"), len(ranks)
    here = model_state(model)
    sent: set[str] = set()
    for source, part in itertools.product(range(stages), range(config.ep)):
        # What a stage has, then the experts of the next processes in it; the first to have it hands it on.
        first = int(ranks[source, part * config.cp * config.tp])
        names: list[Any] = [[name for name in here if name not in sent]]
        if stages * config.ep > 1:
            dist.broadcast_object_list(names, src=first)
        sent.update(names[0])
        for name in names[0]:
            full = torch.empty(0)
            if source == stage and name in here:
                full = here[name]
                full = full.full_tensor() if isinstance(full, DTensor) else full
                if world.rank == first != 0:
                    dist.send(full.cpu(), 0)
            if whole is not None:
                if first != 0:
                    dist.recv(full := torch.empty_like(wanted[name]), first)
                wanted[name].copy_(full)
    return model if whole is None else whole
