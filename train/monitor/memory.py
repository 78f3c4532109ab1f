"""Memory: what is used now, and what may be."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from penjing.core.errors import ConfigError


def memory_use(device: torch.device) -> tuple[int, int] | None:
    """(bytes used by this process, bytes there are): of the accelerator, or of main memory. None of an accelerator
    whose package tells torch neither."""
    if device.type != "cpu":
        try:
            return torch.accelerator.max_memory_allocated(device), torch.accelerator.get_memory_info(device)[1]
        except RuntimeError:
            return None
    page, total = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * page, total
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, total  # macOS: bytes, the largest so far


def memory_limit(device: torch.device, num_local: int = 1) -> int:
    """Bytes that one of `num_local` processes on this machine may use now: 90 % of what is free.

    Raises:
        ConfigError: an accelerator whose package does not tell torch its memory.
    """
    if device.type != "cpu":
        try:
            return int(torch.accelerator.get_memory_info(device)[0] * 0.9)
        except RuntimeError as error:
            raise ConfigError(
                f"torch cannot tell how much memory {device} has; say it by memory.limit, as memory.limit = '16GiB'"
            ) from error
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    else:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(available * 0.9) // num_local
