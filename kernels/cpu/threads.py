"""How many threads the kernels run on."""

from __future__ import annotations

import os
from pathlib import Path


def default_threads() -> int:
    """PENJING_CPU_THREADS, else OMP_NUM_THREADS, else one a physical core that this process may use.

    The affinity mask and the container's CPU quota bound the last two: a team larger than its cores waits for itself.

    Raises:
        ValueError: PENJING_CPU_THREADS is not a whole number from 1 to 1024.
    """
    own = os.environ.get("PENJING_CPU_THREADS")
    if own is not None:
        if not own.isdecimal() or not 1 <= int(own) <= 1024:
            raise ValueError(f"PENJING_CPU_THREADS={own!r}: a whole number from 1 to 1024 is needed")
        return int(own)
    available = min(physical_cores(), cgroup_quota())
    # OMP_NUM_THREADS may be a list, one number a nesting level.
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(wanted), available) if wanted.isdecimal() and int(wanted) > 0 else available


def physical_cores() -> int:
    """Physical cores behind the processors of the affinity mask; two hyperthreads share one set of multipliers."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text().strip())
        except OSError:  # no such file in some sandboxes: count the processor itself
            cores.add(str(cpu))
    return max(len(cores), 1)


def cgroup_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Whole processors of the control group's quota (`docker run --cpus`), at least 1; 1024 without one."""
    try:
        quota, period = path.read_text().split()
    except (OSError, ValueError):
        return 1024
    return 1024 if quota == "max" else max(int(quota) // int(period), 1)
