"""The start of another process, where the machine may have no room for one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from penjing.core.errors import SetupError

_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # of processes, memory and open files


@contextmanager
def room_for_process() -> Iterator[None]:
    """Turn the operating system's refusal to start one more process into a `SetupError`."""
    try:
        yield
    except OSError as error:
        raise no_process(error) from error


def no_process(error: OSError) -> SetupError:
    """Of the refusal to start a process."""
    advice = "; end other programs and run again" if error.errno in _NO_ROOM else ""
    return SetupError(f"no process can be started: {error}{advice}")
