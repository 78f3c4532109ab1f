"""What the operating system tells of processes: whether one lives, and whether this one is at work. Linux's /proc;
elsewhere less is known, and the watch (watch.py) takes longer."""

from __future__ import annotations

import os
import threading
import time
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_BUSY_SHARE = 0.05  # of one core: threads that only wait use less than 0.01


@cache
def machine() -> str:
    """The running system and its process numbers: equal where two processes see each other."""
    boot = _PROC / "sys/kernel/random/boot_id"
    return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}" if boot.exists() else ""


def has_ended(pid: int) -> bool:
    """Whether process `pid` of this machine is known to have ended."""
    return (_PROC / "self").exists() and _stat(_PROC / str(pid))[0] in ("", "Z", "X")


class Activity:
    """Whether this process or one that it started is at work: computes, wants to, or waits for a disk."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._used_s = self._processor_s()

    def idle(self) -> bool:
        """True when there was no work since the last call, as far as is known; the calling thread does not count."""
        now, used_s = time.monotonic(), self._processor_s()
        share = (used_s - self._used_s) / max(now - self._at, 1e-3)
        self._at, self._used_s = now, used_s
        others = [
            thread for thread in _PROC.glob(f"{os.getpid()}/task/*") if thread.name != str(threading.get_native_id())
        ]
        return share < _BUSY_SHARE and not any(_stat(thread)[0] in ("R", "D") for thread in others)

    def _processor_s(self) -> float:
        return time.process_time() - time.thread_time() + sum(_stat(_PROC / str(pid))[1] for pid in _children())


def _children(pid: int | None = None) -> list[int]:
    """All descendants of `pid`, of this process by default."""
    found: list[int] = []
    for listed in _PROC.glob(f"{pid or os.getpid()}/task/*/children"):
        try:
            children = [int(child) for child in listed.read_text().split()]
        except OSError:  # the thread has ended meanwhile
            continue
        for child in children:
            found += [child, *_children(child)]
    return found


def _stat(entry: Path) -> tuple[str, float]:
    """State and processor seconds of a process or thread; ("", 0) when there is none. See proc(5)."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
