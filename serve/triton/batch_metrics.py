"""Figures of a batched model on Triton server's metrics endpoint, which by itself sees no queue of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from penjing.serve.triton.metrics import FINISHED, TIME_BUCKETS, Families, grow

ANSWERED = "stop"  # as a decoder calls a good end
MAX_SAMPLES = 100_000  # kept until they are shown; older ones go first
ROW_BUCKETS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0]
HISTOGRAMS = {
    "request_queue_time_seconds": ("From a request's arrival to the start of its batch, in seconds.", TIME_BUCKETS),
    "batch_time_seconds": ("From the start of a batch to its answers, in seconds.", TIME_BUCKETS),
    "batch_rows": ("Rows of one batch.", ROW_BUCKETS),
}


class BatchSamples:
    """What the threads of an adapter note; each list is appended to by one thread and emptied by another."""

    def __init__(self) -> None:
        self.answered = 0
        self._samples = {name: deque[float](maxlen=MAX_SAMPLES) for name in HISTOGRAMS}

    def note(self, name: str, value: float) -> None:
        self._samples[name].append(value)

    def take(self) -> dict[str, list[float]]:
        """All samples by histogram, which are then forgotten."""
        return {name: [samples.popleft() for _ in range(len(samples))] for name, samples in self._samples.items()}


class BatchMetrics:
    """Registers the metric families of a batched model and brings them up to date."""

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        families = self._families = Families(pb_utils, model_name)
        self._waiting = families.gauge("num_requests_waiting", "Requests that wait for a batch.")
        self._running = families.gauge("num_requests_running", "Requests in batches that are computed.")
        self._answered = families.counters(FINISHED, "Requests that were answered.", "finished_reason", (ANSWERED,))
        self._refused = families.refused()
        self._histograms = {
            name: families.histogram(name, text, buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._shown: Mapping[str, int] = {}
        self._shown_answered = 0

    def update(self, waiting: int, running: int, samples: BatchSamples, refusals: Mapping[str, int]) -> None:
        """Show how many requests wait and run, and what was noted since the last call."""
        self._waiting.set(waiting)
        self._running.set(running)
        answered = samples.answered
        grow(self._answered, {ANSWERED: answered}, {ANSWERED: self._shown_answered})
        grow(self._refused, refusals, self._shown)
        for name, values in samples.take().items():
            for value in values:
                self._histograms[name].observe(value)
        self._shown, self._shown_answered = refusals, answered
