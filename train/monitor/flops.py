"""Floating-point operations of a model and of the machine: what MFU (model FLOPs utilisation) is made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, mm_flop, sdpa_flop

from penjing.kernels.dispatch import force_torch
from penjing.train.objective.objective import Batch, Objective
from penjing.train.processes.devices import synchronize

# Dense bfloat16 peaks from NVIDIA's data sheets, FLOP/s; the names are parts of torch's device names.
_DATASHEET = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _cpu_attention_flops(q: torch.Size, k: torch.Size, v: torch.Size, *_: object, **__: object) -> int:
    k, v = (torch.Size((*x[:1], q[1], *x[2:])) for x in (k, v))  # heads that several queries share come as they are
    return sdpa_flop(q, k, v)


def _integer_flops(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    return mm_flop(a, b)


_OTHERS = {_CPU_ATTENTION: _cpu_attention_flops, torch.ops.aten._int_mm: _integer_flops}


@torch.no_grad()
def forward_flops(model: nn.Module, objective: Objective, batch: Batch) -> float:
    """Floating-point operations of one forward pass of `batch` (matrix products, convolutions, attention), counted as
    it runs.

    The full square of causal attention is counted, as is usual. Training costs three times this; recomputation is not
    counted.
    """
    training = model.training
    model.eval()  # the statistics of batch norms stay
    try:
        with FlopCounterMode(display=False, custom_mapping=_OTHERS) as counter:
            objective(model, batch)
    finally:
        model.train(training)
    return float(counter.get_total_flops())


def model_flops(build_model: Callable[[], nn.Module], objective: Objective, batch: Batch) -> float:
    """`forward_flops` of a model that is never made: on tensors without data."""
    with force_torch(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake: Batch = {name: mode.from_tensor(tensor) for name, tensor in batch.items()}
        return forward_flops(build_model(), objective, fake)


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """(FLOP/s, where the number comes from): the data sheet's for known GPUs in 16 bits, else a matrix product
    measured once in a process."""
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        for part, peak in _DATASHEET.items():
            if part in name:
                return peak, f"data sheet of {name}"
    return _measured_peak(device, dtype)


_LONG_S = 0.01  # of a product: at 100 TFLOP/s one of 8192³ takes 11 ms, and larger ones are no better use of a device


@cache
def _measured_peak(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    size, largest = 1024, 1024 if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    while size < largest and min(_time_product(a, b) for _ in range(2)) < _LONG_S:  # small ones leave much of it idle
        size *= 2
        a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    times = [_time_product(a, b) for _ in range(3)]
    while len(times) < 12 and min(times[-2:]) > 1.1 * min(times):  # of a busy machine the quietest moment
        times.append(_time_product(a, b))
    seconds = min(times)
    return 2 * size**3 / seconds, f"{size}³ matrix product measured here in {str(dtype).removeprefix('torch.')}"


def _time_product(a: torch.Tensor, b: torch.Tensor) -> float:
    synchronize(a.device)
    began = time.perf_counter()
    torch.mm(a, b)
    synchronize(a.device)
    return time.perf_counter() - began
