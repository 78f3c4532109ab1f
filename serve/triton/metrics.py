"""The engine's figures on Triton server's metrics endpoint, under the names of vLLM's metrics with our prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penjing.serve.engine.stats import EngineStats

PREFIX = "penjing:"
GAUGES = {
    "num_requests_running": "Sequences in the running batch.",
    "num_requests_waiting": "Sequences that wait for a place in the batch.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks that sequences hold, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Sequences that lost their place and are computed again.",
    "prompt_tokens": "Prompt tokens of accepted requests.",
    "generation_tokens": "Tokens generated.",
}
FINISHED = "request_success"  # vLLM's name; the label tells how the sequence ended
FINISH_REASONS = ("stop", "length", "abort", "error")
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0]
HISTOGRAMS = {
    "time_to_first_token_seconds": (
        "From arrival to the first token, in seconds.",
        [*_SECONDS, 7.5, 10.0, 20.0, 40.0, 80.0],
    ),
    "time_per_output_token_seconds": ("Between two tokens of one answer, in seconds.", [*_SECONDS, 7.5, 10.0]),
    "iteration_tokens_total": (
        "Tokens computed in one step.",
        [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0],
    ),
}


class EngineMetrics:
    """Registers the metric families and brings them up to date.

    Args:
        pb_utils: Triton server's Python backend module.
        model_name: the `model` label.
        baseline: counts that were there before the first request and are not shown.
    """

    def __init__(self, pb_utils: Any, model_name: str, baseline: EngineStats) -> None:
        self._families = []  # a family takes its metrics with it when it is collected
        labels = {"model": model_name}

        def register(name: str, text: str, kind: Any, **options: Any) -> Any:
            family = pb_utils.MetricFamily(name=PREFIX + name, description=text, kind=kind)
            self._families.append(family)
            return family.Metric(labels=labels, **options)

        kinds = pb_utils.MetricFamily
        self._gauges = {name: register(name, text, kinds.GAUGE) for name, text in GAUGES.items()}
        self._counters = {name: register(name, text, kinds.COUNTER) for name, text in COUNTERS.items()}
        self._histograms = {
            name: register(name, text, kinds.HISTOGRAM, buckets=buckets) for name, (text, buckets) in HISTOGRAMS.items()
        }
        family = pb_utils.MetricFamily(
            name=PREFIX + FINISHED, description="Finished sequences by how they ended.", kind=kinds.COUNTER
        )
        self._families.append(family)
        self._finished = {
            reason: family.Metric(labels=labels | {"finished_reason": reason}) for reason in FINISH_REASONS
        }
        self._shown = baseline

    def update(self, stats: EngineStats, samples: Mapping[str, list[float]]) -> None:
        """Show `stats`, and add `samples` to the histograms. A call to the server costs about 20 µs; what has not
        changed costs none."""
        shown = self._shown
        for name, gauge in self._gauges.items():
            if getattr(stats, name) != getattr(shown, name):
                gauge.set(getattr(stats, name))
        for name, counter in self._counters.items():
            if grown := getattr(stats, name) - getattr(shown, name):
                counter.increment(grown)
        for reason, counter in self._finished.items():
            if grown := stats.request_success.get(reason, 0) - shown.request_success.get(reason, 0):
                counter.increment(grown)
        for name, values in samples.items():
            for value in values:
                self._histograms[name].observe(value)
        self._shown = stats
