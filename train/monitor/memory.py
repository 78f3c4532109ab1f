"""Memory: what is used now, and what may be."""

from __future__ import annotations

import os
from pathlib import Path

import torch


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
