"""What is elsewhere and does not answer: whoever waits for it is told so, before it is given up."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penjing.core.progress import printable

LATE_S = 2.0
_QUIET_S = 60.0  # what has been said is not said again before: many threads may wait for the same
_lock = threading.Lock()
_said_at: dict[str, float] = {}


@contextmanager
def told_if_late(message: str) -> Iterator[None]:
    """Say `message` on standard error where what is done inside takes more than `LATE_S`; see `say`."""
    timer = threading.Timer(LATE_S, say, (message,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(message: str) -> None:
    """Print `message` on standard error, once a minute at most."""
    with _lock:
        if time.monotonic() - _said_at.get(message, -_QUIET_S) < _QUIET_S:
            return
        _said_at[message] = time.monotonic()
    print(printable(message), file=sys.stderr, flush=True)
