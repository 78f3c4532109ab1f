"""Signals that ask a run to stop: it finishes its update and saves its state first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STOPPING = b"\nstopping once this update is saved; Ctrl-C again ends the run at once\n"


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM or SIGINT into a request that the loop sees; a second SIGINT interrupts at once."""
    asked: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":  # one of several processes says it
            os.write(2, _STOPPING)  # not print, which a signal may have interrupted, and which refuses to begin anew

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
