"""A folder between input and output that one process works in."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penjing.core.errors import InputError
from penjing.core.files import writing

_LOCK = ".lock"


@contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Keep other processes out of the folder `work`, made if need be; it goes if nothing was put into it.

    Raises:
        InputError: one is in it, or it holds files of others.
        SetupError: it cannot be made.
    """
    lock = None
    while lock is None:  # a process that ended just now has removed the folder, and a lock in none keeps nobody out
        with writing(work):
            lock = _lock(work)
    try:
        yield
    finally:
        if work.is_dir() and os.listdir(work) == [_LOCK]:
            shutil.rmtree(work)
        os.close(lock)


def _lock(work: Path) -> int | None:
    if work.is_dir() and not (work / _LOCK).exists() and any(work.iterdir()):
        raise InputError(f"{work} holds files that are not of a run of this command; move it, or choose another output")
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock = os.open(work / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (work / _LOCK).stat().st_ino == os.fstat(lock).st_ino:
            return lock
    except BlockingIOError:
        os.close(lock)
        raise InputError(f"{work} is worked in by another process; wait for it, or choose another output") from None
    except FileNotFoundError:
        pass  # removed in between: the lock is closed below
    os.close(lock)
    return None
