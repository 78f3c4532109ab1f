"""A served model's figures on Triton server's metrics endpoint, under the names of vLLM's metrics with our prefix."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from penjing.serve.client.errors import code_of
from penjing.serve.engine.stats import MASKS, EngineStats

log = logging.getLogger(__name__)
_Metrics = TypeVar("_Metrics")
PREFIX = "penjing:"
GAUGES = {
    "num_requests_running": "Sequences in the running batch.",
    "num_requests_waiting": "Sequences that wait for a place in the batch.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that sequences hold, 0 to 1.",
}
CONTEXT = "max_model_len"
"""A gauge that says the same as long as the model is served."""
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Sequences that lost their place and are computed again.",
    "prompt_tokens": "Prompt tokens of accepted requests.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_draft_tokens": "Guessed tokens that steps have checked.",
    "spec_decode_num_accepted_tokens": "Guessed tokens that were right.",
}
FINISHED = "request_success"  # vLLM's name; the label tells how the sequence ended
FINISH_REASONS = ("stop", "length", "abort", "error")
TIME_BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0]
HISTOGRAMS = {
    "request_queue_time_seconds": (
        "From arrival to the first step that computes something of a sequence, in seconds.",
        [*TIME_BUCKETS, 7.5, 10.0, 20.0, 40.0, 80.0],
    ),
    MASKS: (
        "What it took to find the tokens that may come next in an answer with a form, in seconds.",
        [0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *TIME_BUCKETS],
    ),
    "time_to_first_token_seconds": (
        "From arrival to the first token, in seconds.",
        [*TIME_BUCKETS, 7.5, 10.0, 20.0, 40.0, 80.0],
    ),
    "time_per_output_token_seconds": ("Between two tokens of one answer, in seconds.", [*TIME_BUCKETS, 7.5, 10.0]),
    "iteration_tokens_total": (
        "Tokens computed in one step.",
        [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0],
    ),
}


REFUSED = "requests_refused"  # vLLM has none
TIMEOUT = "timeout"
_REASONS = {
    "INVALID_ARGUMENT": "invalid",
    "RESOURCE_EXHAUSTED": "overloaded",
    "UNAVAILABLE": "unavailable",
    "INTERNAL": "error",
}
REASONS = (*_REASONS.values(), TIMEOUT)


def registered(pb_utils: Any, register: Callable[[], _Metrics]) -> _Metrics | None:
    """What `register` makes of Triton server's metrics; None, which the log says, where it takes none."""
    try:
        return register()
    except pb_utils.TritonModelException as error:
        log.warning("Triton server takes no metrics (started with --allow-metrics=false?): %s", error)
        return None


class Refusals:
    """Counts requests that got no answer, by reason; from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, error: BaseException | None) -> None:
        """One more; None: it had waited longer than it may."""
        reason = TIMEOUT if error is None else _REASONS[code_of(error).name]
        with self._lock:
            self._counts[reason] += 1

    def snapshot(self) -> dict[str, int]:
        """Counts by reason since the start."""
        with self._lock:
            return dict(self._counts)


class Families:
    """Registers metrics of one model with Triton server.

    Args:
        pb_utils: Triton server's Python backend module.
        model_name: the `model` label.
    """

    def __init__(self, pb_utils: Any, model_name: str) -> None:
        self._kinds = pb_utils.MetricFamily
        self._labels = {"model": model_name}
        self._families: list[Any] = []  # a family takes its metrics with it when it is collected

    def gauge(self, name: str, text: str) -> Any:
        return self._register(name, text, self._kinds.GAUGE).Metric(labels=self._labels)

    def counter(self, name: str, text: str) -> Any:
        return self._register(name, text, self._kinds.COUNTER).Metric(labels=self._labels)

    def counters(self, name: str, text: str, label: str, values: tuple[str, ...]) -> dict[str, Any]:
        """A counter for each value of `label`."""
        family = self._register(name, text, self._kinds.COUNTER)
        return {value: family.Metric(labels=self._labels | {label: value}) for value in values}

    def histogram(self, name: str, text: str, buckets: list[float]) -> Any:
        return self._register(name, text, self._kinds.HISTOGRAM).Metric(labels=self._labels, buckets=buckets)

    def refused(self) -> dict[str, Any]:
        """Counters of refusals by reason."""
        return self.counters(REFUSED, "Requests that got no answer, by reason.", "reason", REASONS)

    def _register(self, name: str, text: str, kind: Any) -> Any:
        self._families.append(self._kinds(name=PREFIX + name, description=text, kind=kind))
        return self._families[-1]


def grow(counters: Mapping[str, Any], counts: Mapping[str, int], shown: Mapping[str, int]) -> None:
    """Add to `counters` what `counts` have more than `shown`."""
    for name, counter in counters.items():
        if grown := counts.get(name, 0) - shown.get(name, 0):
            counter.increment(grown)


class EngineMetrics:
    """Registers the metric families and brings them up to date.

    Args:
        pb_utils: Triton server's Python backend module.
        model_name: the `model` label.
        baseline: counts that were there before the first request and are not shown.
        context: the longest prompt and answer together, in tokens.
    """

    def __init__(self, pb_utils: Any, model_name: str, baseline: EngineStats, context: int) -> None:
        families = self._families = Families(pb_utils, model_name)
        self._gauges = {name: families.gauge(name, text) for name, text in GAUGES.items()}
        self._counters = {name: families.counter(name, text) for name, text in COUNTERS.items()}
        self._histograms = {
            name: families.histogram(name, text, buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        text = "Finished sequences by how they ended."
        self._finished = families.counters(FINISHED, text, "finished_reason", FINISH_REASONS)
        self._refused = families.refused()
        families.gauge(CONTEXT, "Longest prompt and answer together, in tokens.").set(context)
        self._shown_refusals: Mapping[str, int] = {}
        self._shown = baseline

    def update(self, stats: EngineStats, samples: Mapping[str, list[float]], refusals: Mapping[str, int]) -> None:
        """Show `stats` and `refusals`, and add `samples` to the histograms. A call to the server costs about 20 µs;
        what has not changed costs none."""
        shown = self._shown
        for name, gauge in self._gauges.items():
            if getattr(stats, name) != getattr(shown, name):
                gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            if grown := getattr(stats, name) - getattr(shown, name):
                counter.increment(grown)
        grow(self._finished, stats.request_success, shown.request_success)
        grow(self._refused, refusals, self._shown_refusals)
        for name, values in samples.items():
            for value in values:
                self._histograms[name].observe(value)
        self._shown, self._shown_refusals = stats, refusals
