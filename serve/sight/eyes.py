"""What a model sees with, on threads: pictures become rows, those of several images in one batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from penjing.core.vision.graph_eyes import GraphEyes
from penjing.core.vision.sight import Sight

PART = 8  # pictures that go through the network at once on one thread: more gain nothing and take more memory

Picture = NDArray[np.uint8]
Rows = torch.Tensor


class Eyes:
    """A batch is shared out among threads, each of which computes its pictures in one pass of its own; a few pictures
    share them all, unless the encoder is a graph.

    A picture's rows have the same bits in any company and on any number of threads.

    Args:
        sight: see `load_model`, which makes it invariant.
        threads: that compute beside each other; 0: one for each core.
        nice: of these threads; they then leave processors to other work, this process's included.
    """

    def __init__(self, sight: Sight, threads: int = 0, nice: int = 0) -> None:
        self._sight, self._threads = sight, threads or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self._threads, "penjing-eyes", _begin_thread, (nice,))

    def start(self, pictures: Sequence[Picture]) -> Sequence[Future[Rows]]:
        """Begin to compute (height, width, channels) uint8 each → (R, E) float32 each."""
        size = min(PART, -(-len(pictures) // self._threads))
        alone = isinstance(self._sight.vision, GraphEyes)
        parts = [pictures[at : at + size] for at in range(0, len(pictures), size)] if pictures else []
        found = list[Future[Rows]]()
        for part in parts:
            waiting = [Future[Rows]() for _ in part]
            self._pool.submit(self._compute, part, waiting, 1 if alone else max(1, self._threads // len(parts)))
            found += waiting
        return found

    def call(self, what: Callable[[], None]) -> None:
        """Run `what` on one of the threads, behind the pictures that were given before."""
        self._pool.submit(what)

    def __call__(self, pictures: Sequence[Picture]) -> list[Rows]:
        """The rows of each picture."""
        return [each.result() for each in self.start(pictures)]

    def _compute(self, part: Sequence[Picture], waiting: Sequence[Future[Rows]], threads: int) -> None:
        try:
            torch.set_num_threads(threads)  # torch counts threads for each thread that asks it
            for future, rows in zip(waiting, self._sight.rows_of(part), strict=True):
                future.set_result(rows.clone())  # no view, which would keep the others' memory
        except Exception as error:
            for future in waiting:
                if not future.done():
                    future.set_exception(error)


def _begin_thread(nice: int) -> None:
    with suppress(OSError):  # Linux has a priority for each thread; a machine may forbid to change it
        os.nice(nice)
