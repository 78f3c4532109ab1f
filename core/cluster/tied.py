"""Processes that end with the one that started them, whatever ends it."""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)


def end_with(parent: int, number: int) -> None:
    """Let the kernel send the signal `number` to this process when its `parent` has ended, or rather the thread of it
    that started this one; for `preexec_fn`. If it has ended already, so does this process."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)
