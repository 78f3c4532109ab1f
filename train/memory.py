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

from penjing.core.errors import ConfigError
from penjing.train.objective import Batch, Objective

_STATE_PER_PARAMETER = {"adamw": 2, "sgd": 1}


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
        optimizer=trainable * _STATE_PER_PARAMETER[optimizer],
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
    known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> Any:
        if _storage(tensor) not in known:
            saved[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda packed: packed):
        loss = objective(model, batch)
    # The backward pass begins with the gradient of what it ends with, the logits: their largest tensors once more.
    largest = max((storage.nbytes() for storage in saved.values()), default=0)
    del loss
    return sum(storage.nbytes() for storage in saved.values()) + largest


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
