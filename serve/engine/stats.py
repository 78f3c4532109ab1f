"""What the engine counts: gauges and counters for the metrics endpoint, and samples for its histograms."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

MASKS = "guided_mask_seconds"  # the one histogram whose samples lie elsewhere, where masks are made
MAX_SAMPLES = 100_000  # samples kept until they are taken; older ones go first, so an unread engine stays bounded


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; the names are those of vLLM's metrics. Counters only grow."""

    num_requests_running: int
    num_requests_waiting: int
    num_waiting_tokens: int
    kv_cache_usage_perc: float  # 0 to 1: blocks held by sequences ÷ usable blocks
    num_blocks: int
    num_blocks_used: int
    prefix_cache_queries: int  # prompt tokens looked up
    prefix_cache_hits: int  # prompt tokens found
    num_preemptions: int
    prompt_tokens: int  # of requests that were admitted
    generation_tokens: int
    spec_decode_num_draft_tokens: int  # guessed tokens that steps have checked
    spec_decode_num_accepted_tokens: int  # of them those that came
    num_steps: int
    request_success: dict[str, int]  # finished sequences by finish reason


class Queued(Protocol):
    """An answer, as far as its time in the queue goes; times in seconds of `time.monotonic`."""

    arrival_time: float
    begun_time: float | None


@dataclass
class Samples:
    """Observations since they were last taken, in seconds or tokens, named as the histograms."""

    request_queue_time_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    time_to_first_token_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    time_per_output_token_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    iteration_tokens_total: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def begin(self, answers: Iterable[Queued], now: float) -> None:
        """Note how long those of `answers` have waited that a step computes for the first time."""
        for answer in answers:
            if answer.begun_time is None:
                answer.begun_time = now
                self.request_queue_time_seconds.append(now - answer.arrival_time)

    def take(self) -> dict[str, list[float]]:
        """All samples by histogram name, which are then forgotten. Safe beside a thread that appends."""
        taken: dict[str, list[float]] = {}
        for name, samples in vars(self).items():
            taken[name] = [samples.popleft() for _ in range(len(samples))]
        return taken
