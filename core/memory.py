"""Resident memory of this process: now, and its peak over a block of code."""

from __future__ import annotations

import ctypes
import resource
from types import TracebackType
from typing import ClassVar

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt(3)


class PeakMemory:
    """A context manager; `peak_bytes` is the largest resident set size inside it.

    Linux keeps a high-water mark that a process may reset. Where it may not, the mark since the process began is taken,
    which is never too small. Blocks may lie inside each other: the outer one's peak is the largest of all.
    """

    _open: ClassVar[list[PeakMemory]] = []

    def __enter__(self) -> PeakMemory:
        self.peak_bytes = 0
        for outer in self._open:  # the mark is reset below
            outer.peak_bytes = max(outer.peak_bytes, _status_bytes("VmHWM"))
        self._open.append(self)
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")  # resets the high-water mark: proc(5)
        except OSError:
            pass  # not permitted here: the mark since the process began stands
        return self

    def __exit__(self, *_: tuple[type[BaseException], BaseException, TracebackType]) -> None:
        mark = _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._open.remove(self)
        for block in (self, *self._open):
            block.peak_bytes = max(block.peak_bytes, mark)

    @staticmethod
    def resident_bytes() -> int:
        """Resident set size now."""
        return _status_bytes("VmRSS") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def release_unused() -> None:
    """Give freed memory back to the system, where the C library keeps it (glibc) and can be told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """From here on keep what is freed for the next allocation, where the C library (glibc) can be told.

    Otherwise blocks of 32 MB and more go back to the system each time and come again page by page, zeroed: activations
    of images are such blocks, and a third of the processor time of an update on them went into that.
    """
    choose = getattr(ctypes.CDLL(None), "mallopt", None)
    if choose is not None:
        choose(_MMAP_MAX, 0)
        choose(_TRIM_THRESHOLD, 2**31 - 1)


def available_bytes() -> int:
    """Memory that the system can give without swapping."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 0
