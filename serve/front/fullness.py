"""What a model that is full costs: for a moment after it has refused a request, those that ask for as much are refused
here."""

from __future__ import annotations

import time
from collections.abc import Callable

from penjing.core.errors import OverloadedError

MEMORY_SECONDS = 0.05
"""In which few answers end: a place that gets free is taken so much later. To ask the model costs 2 ms of processor
time in its processes, which ten times too many requests a second would take from the answers that run."""
MAX_KEYS = 1000
WORDS = "the engine is overloaded"


class Fullness:
    """Refusals that one model has just uttered, by the key of who asked: a key may wait for places of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._found: dict[str, tuple[float, list[tuple[int, int, OverloadedError]]]] = {}

    def note(self, key: str, num_answers: int, size: int, error: OverloadedError) -> None:
        """The model has refused so many answers to a request of `size` bytes. A request whose time is up says nothing
        about others."""
        if WORDS not in str(error):
            return
        now = self._clock()
        until, refusals = self._found.get(key, (0.0, []))
        if until <= now:
            if len(self._found) >= MAX_KEYS:
                self._found = {name: found for name, found in self._found.items() if found[0] > now}
            until, refusals = now + MEMORY_SECONDS, []
            self._found[key] = until, refusals
        refusals.append((num_answers, size, error))

    def check(self, key: str, num_answers: int, size: int) -> None:
        """Raise what the model has just said to a request of this key that asked for no more.

        Raises:
            OverloadedError: it has no place.
        """
        until, refusals = self._found.get(key, (0.0, []))
        if until > self._clock():
            for refused, bytes_, error in refusals:
                if num_answers >= refused and size >= bytes_:
                    raise OverloadedError(str(error), error.retry_after)
