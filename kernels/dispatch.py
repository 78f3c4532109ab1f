"""Which implementation an operation runs on: the C++ extension for CPU tensors where it is built, torch otherwise.

`PENJING_KERNELS=torch` keeps every operation on torch; `force_torch()` does so for a block of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

CPP_OPERATIONS: tuple[str, ...] = ("int8_linear", "quantize_per_token", "paged_attention", "write_kv")
TORCH_OPERATIONS: tuple[str, ...] = ("linear", "rms_norm", "rotary", "swiglu")

_forced: ContextVar[bool] = ContextVar("penjing_force_torch", default=os.environ.get("PENJING_KERNELS") == "torch")


@contextmanager
def force_torch() -> Iterator[None]:
    """Run the block's operations on torch, in this thread or task only."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


def cpu_extension(*tensors: torch.Tensor) -> Any | None:
    """The C++ extension if it is built, not switched off, and all `tensors` lie on the CPU; else None."""
    if _forced.get() or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    from penjing.kernels.cpu import extension

    return extension()


def describe() -> dict[str, str]:
    """Operation → the implementation chosen for CPU tensors, and why."""
    if _forced.get():
        chosen = "torch (PENJING_KERNELS=torch or force_torch)"
    elif cpu_extension() is None:
        chosen = "torch (the C++ extension is not built)"
    else:
        chosen = "C++ extension"
    return dict.fromkeys(CPP_OPERATIONS, chosen) | dict.fromkeys(TORCH_OPERATIONS, "torch")
