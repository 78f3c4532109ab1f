"""Memory: what a run will need, estimated before anything is allocated, and what is used now."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penjing.core.errors import ConfigError
from penjing.train.objective.objective import Batch, Objective

STATE_PER_PARAMETER = {"adamw": 2, "sgd": 1}  # what an optimiser keeps, of the size of the parameters


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process, by what they are for; `activations` holds one micro-batch at the end of its forward
    pass."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    reduction: int  # DDP's buckets
    activations: int

    @property
    def total(self) -> int:
        """All together, bytes."""
        return self.parameters + self.gradients + self.optimizer + self.average + self.reduction + self.activations

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
        optimizer: "adamw" or "sgd".
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
        optimizer=trainable * STATE_PER_PARAMETER[optimizer],
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
    else:
        share = (limit - fixed) / estimate.activations
        advice = (
            f"lower data.micro_batch to about {share:.0%} of it (the update stays the same), "
            "or set memory.recompute = 'full'"
        )
    raise ConfigError(f"{estimate}; only {limit / 2**20:,.0f} MiB may be used (memory.limit); {advice}")


def memory_use(device: torch.device) -> tuple[int, int]:
    """(bytes used by this process, bytes there are): of the GPU, or of main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * page, total
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, total  # macOS: bytes, the largest so far


def memory_limit(device: torch.device, num_local: int = 1) -> int:
    """Bytes that one of `num_local` processes on this machine may use now: 90 % of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 0.9)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(available * 0.9) // num_local


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
