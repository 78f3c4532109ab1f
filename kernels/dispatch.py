"""Which implementation an operation runs on: the C++ extension for CPU tensors where it is built, torch otherwise.

`PENJING_KERNELS=torch` keeps every operation on torch; `force_torch()` does so for a block of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from penjing.kernels.cpu.functions import CpuExtension

CPP_OPERATIONS: tuple[str, ...] = (
    "int8_linear",
    "linear",
    "quantize_per_token",
    "paged_attention",
    "write_kv",
    "rms_norm",
    "swiglu",
)
TORCH_OPERATIONS: tuple[str, ...] = ("rotary",)

_forced: ContextVar[bool] = ContextVar("penjing_force_torch", default=os.environ.get("PENJING_KERNELS") == "torch")


@contextmanager
def force_torch() -> Iterator[None]:
    """Run the block's operations on torch, in this thread or task only."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def cpu_extension(*tensors: torch.Tensor) -> CpuExtension | None:
    """The C++ extension, if it is built, not switched off, and can take `tensors`: on the CPU, no gradient wanted."""
    if _forced.get() or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    from penjing.kernels.cpu import extension

    return extension()


def describe() -> dict[str, str]:
    """Operation → the implementation chosen for CPU tensors, and why."""
    if _forced.get():
        chosen = "torch (PENJING_KERNELS=torch or force_torch)"
    elif (extension := cpu_extension()) is None:
        chosen = "torch (the C++ extension is not built)"
    else:
        chosen = f"C++ ({extension.isa}, {extension.num_threads} threads)"
    return dict.fromkeys(CPP_OPERATIONS, chosen) | dict.fromkeys(TORCH_OPERATIONS, "torch (the decoder step fuses it)")
