"""Signals that ask a run to stop: it finishes its update and saves its state first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penjing.core.errors import PenjingError

_STOPPING = b"\nstopping once this update is saved; Ctrl-C again ends the run at once\n"


class InterruptedRunError(PenjingError):
    """The run was asked to stop (SIGTERM, SIGINT); its state is saved."""

    exit_code = 128 + signal.SIGTERM


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGTERM or SIGINT into a request that the loop sees; a second SIGINT interrupts at once.

    An InterruptedRunError that passes has the exit code that shells give to this process's signal: 143 or 130.
    """
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
    except InterruptedRunError as error:
        error.exit_code = 128 + asked[0] if asked else error.exit_code  # another process was asked
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
