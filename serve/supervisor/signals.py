"""Signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def stop_signals(on_stop: Callable[[], None]) -> Iterator[int]:
    """Call `on_stop` for each SIGINT, SIGTERM and SIGHUP; yields a descriptor that becomes readable when one comes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def note(*_: Any) -> None:
        on_stop()
        with suppress(BlockingIOError):
            os.write(writer, b"x")

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
