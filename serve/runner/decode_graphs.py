"""Decode steps as CUDA graphs: one captured for each of a few batch sizes, the others padded to the next.

Launching a step's kernels one by one takes the host longer than a GPU needs to run them for a small model; a graph is
one launch. A graph reads and writes the addresses that it was captured with, so inputs lie in static buffers, which the
caller fills, and results stay valid until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

MAX_BUCKET = 256  # beyond, a step's kernels are long enough to hide their launches
WARM_RUNS = 2  # before a capture: kernels are compiled and loaded, libraries have their workspaces

Tensors = tuple[torch.Tensor, ...]


class Captured(NamedTuple):
    """A step that can be run again, and the tensors that it fills."""

    replay: Callable[[], Any]
    results: Tensors


class GraphMemory:
    """Memory that the graphs share, since one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensors]) -> Captured:
        """Capture what `run` launches on the current CUDA device."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_RUNS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            results = run()
        return Captured(graph.replay, results)


def bucket_sizes(max_sequences: int) -> list[int]:
    """1, 2, 4 … up to `max_sequences`, which is one itself, and MAX_BUCKET."""
    largest = min(max_sequences, MAX_BUCKET)
    return sorted({largest} | {1 << i for i in range(largest.bit_length()) if 1 << i <= largest})


class DecodeGraphs:
    """The captured steps of `decode`, which runs one of a given number of sequences."""

    def __init__(
        self,
        decode: Callable[[int], Tensors],
        max_sequences: int,
        capture: Callable[[Callable[[], Tensors]], Captured] | None = None,
    ) -> None:
        """Capture every size, the largest first: the smaller ones then fit the memory that it has left.

        Args:
            capture: stands for `GraphMemory().capture`, where there is no CUDA device.
        """
        self.sizes = bucket_sizes(max_sequences)
        capture = capture or GraphMemory().capture
        self._captured = {size: capture(partial(decode, size)) for size in reversed(self.sizes)}

    def bucket(self, num_sequences: int) -> int | None:
        """The smallest size that holds so many sequences; None if there is none."""
        return next((size for size in self.sizes if size >= num_sequences), None)

    def replay(self, size: int) -> Tensors:
        """Run the step of `size` on what the buffers hold; the results of its rows, valid until the next replay."""
        captured = self._captured[size]
        captured.replay()
        return captured.results
