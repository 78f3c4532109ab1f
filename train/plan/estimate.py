"""Memory of a process of any model, found before anything is allocated by one forward pass on tensors without data;
memory.py counts that of decoders from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.core.errors import ConfigError
from penjing.train.objective.objective import Batch, Objective
from penjing.train.parallel.mesh import MeshWorld
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.plan.memory import STATE_PER_PARAMETER
from penjing.train.processes.world import World


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process, by what they are for; `activations` holds one micro-batch at the end of its forward pass,
    `beside` what a task keeps beside the model that learns, such as another model that it is compared with."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    reduction: int  # DDP's buckets
    activations: int
    beside: int = 0

    @property
    def total(self) -> int:
        """All together, bytes."""
        return sum(self.__dict__.values())

    def __str__(self) -> str:
        parts = {name: size for name, size in self.__dict__.items() if size}
        listed = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items())
        return f"memory of a process: {self.total / 2**20:,.0f} MiB ({listed})"


def estimate_memory(
    build_model: Callable[[], nn.Module],
    objective: Objective,
    batch: Batch,
    *,
    optimizer: str,
    averaged: bool,
    replicated: bool,
) -> MemoryEstimate:
    """What training needs, found by running one forward pass on tensors without data.

    Args:
        build_model: makes the model as it will train, precision and recomputation applied.
        batch: one micro-batch; only shapes and dtypes matter.
        optimizer: its name in `OptimizerConfig`.
        averaged: an exponential moving average of the weights is kept.
        replicated: the gradients are reduced over several processes.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model = build_model()
        parameters = sum(parameter.nbytes for parameter in model.parameters())
        trainable = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        fake: Batch = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        activations = _saved_bytes(model, objective, fake)
    return MemoryEstimate(
        parameters=parameters + sum(buffer.nbytes for buffer in model.buffers()),
        gradients=trainable,
        optimizer=round(trainable * STATE_PER_PARAMETER[optimizer]),
        average=trainable if averaged else 0,
        reduction=trainable if replicated else 0,
        activations=activations,
    )


def check_memory(estimate: MemoryEstimate, limit: int) -> None:
    """Refuse what cannot fit into `limit` bytes.

    Raises:
        ConfigError: names the setting to change first.
    """
    if estimate.total <= limit:
        return
    fixed = estimate.total - estimate.activations
    if fixed > limit:
        advice = "the model alone is too large: lower model.num_hidden_layers or model.hidden_size"
        if fixed - estimate.beside <= limit:
            advice = "what is kept beside the model, another one or the keys and values of answers, takes the rest"
    else:
        share = (limit - fixed) / estimate.activations
        advice = (
            f"lower data.micro_batch to about {share:.0%} of it (the update stays the same), "
            "or set memory.recompute = 'full'"
        )
    raise ConfigError(f"{estimate}; only {limit / 2**20:,.0f} MiB may be used (memory.limit); {advice}")


def share_of(estimate: MemoryEstimate, world: World, model: object = None) -> MemoryEstimate:
    """What is left of a whole model's `estimate` for one process of the mesh; `model` is the recipe's.

    Layers are taken as equal. A stage of a pipeline keeps the activations of as many micro-batches as it has stages
    after it, itself included: the first, which this is, of all.
    """
    if not isinstance(world, MeshWorld):
        return estimate
    config = world.config
    data = config.spread(world.data.size) * config.cp
    parts = config.tp * config.pp
    whole = 1.0  # what a process has where ZeRO spreads nothing: less if others have experts in its place
    if config.ep > 1:
        shape = decoder_shape(model)
        whole -= sum(layer.experts for layer in shape.layers) / shape.parameters * (1 - 1 / config.ep)

    def spread(size: int, from_zero: int) -> int:
        return math.ceil(size / parts * (1 / data if config.zero >= from_zero else whole))

    return MemoryEstimate(
        parameters=spread(estimate.parameters, 3),
        gradients=spread(estimate.gradients, 2),
        optimizer=spread(estimate.optimizer, 1),
        average=spread(estimate.average, 1),
        reduction=spread(estimate.reduction, 4),
        activations=-(-estimate.activations // (config.tp * config.cp)),
        beside=estimate.beside,
    )


def _saved_bytes(model: nn.Module, objective: Objective, batch: Batch) -> int:
    with _Alive() as alive:
        loss = objective(model, batch)
        # The backward pass begins at the logits: their gradient, as large as the largest tensor, comes on top.
        total = sum(alive.sizes()) + max(alive.sizes(), default=0)
    del loss
    return total


class _Alive(TorchDispatchMode):
    """Which storages made inside are still alive: whatever holds them, autograd or the cache of a recomputed block."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        for tensor in tree_leaves(output):
            if _is_tensor(tensor) and (storage := tensor.untyped_storage())._cdata not in given:  # else a view
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    def sizes(self) -> list[int]:
        """Bytes of each storage that is alive."""
        return [size for reference, size in self._made.values() if not reference.expired()]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
