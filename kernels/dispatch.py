"""Which implementation an operation runs on: the C++ extension for CPU tensors, the Triton language for CUDA; or torch.

`PENJING_KERNELS=torch` keeps every operation on torch; `force_torch()` does so for a block of code.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module, util
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from penjing.kernels.cpu.functions import CpuExtension

CPP_OPERATIONS: tuple[str, ...] = (
    "int8_linear",
    "int4_linear",
    "linear",
    "quantize_per_token",
    "paged_attention",
    "write_kv",
    "rms_norm",
    "swiglu",
    "hadamard",
)
TORCH_OPERATIONS: tuple[str, ...] = ("rotary",)
# Of attention in pieces: 4 MiB of float32, which caches hold, and 256 MiB; other devices take what the CPU does.
SCORES_AT_ONCE = {"cpu": 1 << 20, "cuda": 1 << 26}
MIN_CAPABILITY = (8, 0)  # Ampere: bf16 and asynchronous copies

_forced: ContextVar[bool] = ContextVar("penjing_force_torch", default=os.environ.get("PENJING_KERNELS") == "torch")
_interpreted: ContextVar[bool] = ContextVar("penjing_force_triton_language", default=False)


@contextmanager
def force_torch() -> Iterator[None]:
    """Run the block's operations on torch, in this thread or task only."""
    token = _forced.set(True)
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def force_triton_language() -> Iterator[None]:
    """Run the block's operations on CPU tensors in the Triton language's interpreter (slow: for tests).

    Raises:
        RuntimeError: `TRITON_INTERPRET=1` was not set before the Triton language was imported.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        raise RuntimeError(
            "set TRITON_INTERPRET=1 before the first import: kernels are made for it when they are defined"
        )
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def cpu_extension(*tensors: torch.Tensor) -> CpuExtension | None:
    """The C++ extension, if it is built, not switched off, and can take `tensors`: on the CPU, no gradient wanted.

    `torch.compile` sees torch alone, so that a model is one graph; tensors without data have nothing to read.
    """
    if torch.compiler.is_compiling() or any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    if _forced.get() or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    from penjing.kernels.cpu import extension

    return extension()


def gpu_kernels(operation: str, *tensors: torch.Tensor) -> ModuleType | None:
    """The module `penjing.kernels.gpu.OPERATION`, if the Triton language is not switched off and can take `tensors`.

    All tensors must lie on a CUDA device that `cuda_refusal` accepts, or on the CPU within `force_triton_language()`.
    `torch.compile` sees torch alone here too, and tensors without data have nothing to read.
    """
    if torch.compiler.is_compiling() or _forced.get() or any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return None
    device = "cpu" if _interpreted.get() else "cuda"
    if any(tensor.device.type != device for tensor in tensors):
        return None
    if device == "cuda" and cuda_refusal() is not None:
        return None
    return import_module(f"penjing.kernels.gpu.{operation}")


def autocast_together(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As autocast, if it is on, casts the inputs of torch's own attention."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


@cache
def cuda_refusal() -> str | None:
    """Why the Triton language is not used here, None where it is; found out once."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if util.find_spec("triton") is None:
        return "the Triton language is not installed: pip install 'penjing[gpu]'"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} is sm_{major}{minor}, sm_{MIN_CAPABILITY[0]}{MIN_CAPABILITY[1]} is needed"
        )
    return None


def describe() -> dict[str, str]:
    """Operation → the implementation chosen for CPU tensors, and why."""
    if _forced.get():
        chosen = "torch (PENJING_KERNELS=torch or force_torch)"
    elif (extension := cpu_extension()) is None:
        chosen = "torch (the C++ extension is not built)"
    else:
        chosen = f"C++ ({extension.isa}, {extension.num_threads} threads)"
    return dict.fromkeys(CPP_OPERATIONS, chosen) | dict.fromkeys(TORCH_OPERATIONS, "torch (the decoder step fuses it)")


def describe_cuda() -> dict[str, str]:
    """Operation → the implementation chosen for CUDA tensors, and why."""
    from penjing.kernels.gpu.registry import OPERATIONS

    refusal = "PENJING_KERNELS=torch or force_torch" if _forced.get() else cuda_refusal()
    if refusal is not None:
        return dict.fromkeys(OPERATIONS, f"torch ({refusal})")
    major, minor = torch.cuda.get_device_capability()
    return dict.fromkeys(OPERATIONS, f"Triton language ({torch.cuda.get_device_name()}, sm_{major}{minor})")
