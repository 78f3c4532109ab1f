"""What computes: the processor, or the accelerator that torch names (CUDA, XPU, an NPU whose package is installed).

No kind of accelerator is named here: torch has one at a time, whose type, count, memory and clock it tells.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from penjing.core.errors import ConfigError

CPU = torch.device("cpu")


def choose_device(device: str) -> torch.device:
    """The device of this process.

    Args:
        device: "cpu", the type of an accelerator as torch spells it, or "auto": the accelerator that is here and can
            train, else the processor.

    Raises:
        ConfigError: a device that torch does not know or finds here, one that cannot train, or more processes than
            there are accelerators.
    """
    if device == "cpu":
        return CPU
    found = torch.accelerator.current_accelerator(check_available=True)
    here = ["cpu"] if found is None else ["cpu", found.type]
    if device != "auto" and device not in here:
        raise ConfigError(f"device = {device!r}: {_missing(device)}; write device = {_either([*here, 'auto'])}")
    if found is None:
        return CPU
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
    if index >= count:
        raise ConfigError(
            f"each process computes on an accelerator of its own: this is process {index + 1} of this machine, where "
            f"torch finds {count} of type {found.type!r}; start {count} (--launch {count}), or set device = 'cpu'"
        )
    chosen = torch.device(found.type, index)
    if (why := _cannot_train(chosen)) is None:
        return chosen
    if device == "auto":
        return CPU
    raise ConfigError(
        f"device = {device!r} cannot sum losses in 64 bits, as training does ({why}); write device = 'cpu'"
    )


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of `device` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def with_buffers_on(device: torch.device, model: nn.Module) -> nn.Module:
    """A model without data, whose buffers were made on the processor whatever was asked for, as rotary frequencies."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                setattr(module, name, torch.empty_like(buffer, device=device))
    return model


def can_pin(device: torch.device) -> bool:
    """Whether there is page-locked memory, from which `device` reads without waiting."""
    if device.type == "cpu":
        return False
    try:
        torch.empty(1).pin_memory()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def backends(device: torch.device) -> str:
    """What processes speak with each other by, as `init_process_group` takes it: for tensors in main memory, and for
    those of the accelerator what torch or its package registered."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{torch.distributed.get_default_backend_for_device(device)}"


def _cannot_train(device: torch.device) -> str | None:
    """What torch says where the device has no float64."""
    try:
        torch.zeros(1, device=device).sum(dtype=torch.float64)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return None


def _missing(device: str) -> str:
    try:
        known = torch.device(device)
    except RuntimeError:
        return "torch knows no device of this name (the package of an NPU makes its name known)"
    if known.index is not None:
        return "processes are given the accelerators of a machine in turn, so that a type has no number"
    return f"torch finds no {known.type} device here"


def _either(names: list[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"
