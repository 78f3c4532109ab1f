"""Independent rows on all cores: parts of batches run beside each other, each on one thread.

ONNX Runtime's own threads share the work of every node and meet after it; one that loses its core for a moment, to the
server or to a client on the same machine, holds all others up, dozens of times a batch. Parts never meet: a thread that
is done with one batch goes on with the next.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

Part = TypeVar("Part")
Result = TypeVar("Result")


class RowThreads:
    """Sessions of one model and the threads that use them.

    Args:
        open_session: makes an ONNX Runtime session with so many threads of its own.
        threads: 0 takes one for each core.

    Attributes:
        alone: the session with one thread.
    """

    def __init__(self, open_session: Callable[[int], Any], threads: int = 0) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        self._together = open_session(self.threads)
        self.alone = self._together if self.threads == 1 else open_session(1)
        self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="penjing-rows")

    def parts(self, rows: int, largest: int) -> list[slice]:
        """Even parts of at most `largest` rows, as many for each thread; one part where some thread would have none."""
        if rows < self.threads:
            return [slice(0, rows)]
        turns = -(-rows // (largest * self.threads))
        count = min(rows, turns * self.threads)
        ends = [rows * index // count for index in range(count + 1)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def start(
        self, work: Callable[[Any, Part], Result], parts: Sequence[Part], begun: Callable[[], None]
    ) -> Callable[[], list[Result]]:
        """Begin `work(session, part)` for each part: a single part has all threads, several have one each.

        Args:
            begun: is called when the first part runs, behind what was started before.

        Returns:
            A function that waits and gives the results, in order.
        """
        session = self._together if len(parts) == 1 else self.alone

        def first(part: Part) -> Result:
            begun()
            return work(session, part)

        futures = [self._pool.submit(first, parts[0])]
        futures += [self._pool.submit(work, session, part) for part in parts[1:]]
        return lambda: [future.result() for future in futures]
