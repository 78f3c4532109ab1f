"""What the front itself counts and times for Prometheus: requests, refusals, answers, and what each key uses."""

from __future__ import annotations

import time

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from penjing.serve.gate.guard import Exchange

PREFIX = "penjing:front_"
MAX_KEYS = 100
OTHER = "other"
"""The label of what has none of its own: a path that is not there, a key beyond the first `MAX_KEYS`."""
ANSWERED = 200
TIMES = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
TOKEN_TIMES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
WHOLE_TIMES = (*TIMES, 160.0, 320.0, 640.0, 1280.0)
LENGTHS = tuple(float(1 << power) for power in range(18))
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request to the first token of a stream, in seconds.", TIMES),
    "time_per_output_token_seconds": ("Between tokens of a stream as they leave, in seconds.", TOKEN_TIMES),
    "e2e_request_latency_seconds": ("From a request to the end of its answer, in seconds.", WHOLE_TIMES),
    "request_prompt_tokens": ("Prompt tokens of an answered request.", LENGTHS),
    "request_generation_tokens": ("Tokens of the answers to a request.", LENGTHS),
}
COUNTERS = {
    "requests": ("Requests by path and status of HTTP; 499: the client has gone.", ("path", "status")),
    "requests_refused": ("Requests that got an error, by its code.", ("reason",)),
    "key_requests": ("Requests of each key.", ("key",)),
    "key_prompt_tokens": ("Prompt tokens that each key has paid for.", ("key",)),
    "key_generation_tokens": ("Tokens of answers that each key has paid for.", ("key",)),
}
"""Prometheus sees them with `_total` behind the name."""
RUNNING = "requests_running"

prometheus_client.disable_created_metrics()  # a second series for each one, which nothing here asks for


class Usage:
    """The figures of one front.

    Args:
        paths: that there are, in Starlette's words. All names at a `{name:path}` count as one, and so do other paths:
            nobody can make series by asking.
    """

    def __init__(self, paths: frozenset[str] = frozenset()) -> None:
        self._paths = paths
        self._under = {path.partition("{")[0]: path.replace(":path}", "}") for path in paths if "{" in path}
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(PREFIX + name, text, labels, registry=self._registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(PREFIX + name, text, ("model",), buckets=buckets, registry=self._registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._running = Gauge(PREFIX + RUNNING, "Requests that have no whole answer yet.", registry=self._registry)
        self._keys: set[str] = set()

    def first_token(self, exchange: Exchange, seconds: float) -> None:
        """The first token of a request has come."""
        self._histograms["time_to_first_token_seconds"].labels(exchange.model).observe(seconds)

    def tokens(self, exchange: Exchange, count: int, seconds: float) -> None:
        """So many tokens of an answer have come, so long after those before; each counts with its part of the time."""
        histogram = self._histograms["time_per_output_token_seconds"].labels(exchange.model)
        for _ in range(count):
            histogram.observe(seconds / count)

    def ended(self, exchange: Exchange) -> None:
        """A request has its answer, or its client has gone."""
        self._counters["requests"].labels(self._path(exchange.path), str(exchange.status)).inc()
        if exchange.reason:
            self._counters["requests_refused"].labels(exchange.reason).inc()
        if exchange.key:
            key = self._key(exchange.key)
            self._counters["key_requests"].labels(key).inc()
            self._counters["key_prompt_tokens"].labels(key).inc(exchange.prompt_tokens)
            self._counters["key_generation_tokens"].labels(key).inc(exchange.completion_tokens)
        if exchange.model and exchange.status == ANSWERED and not exchange.reason:
            seconds = time.monotonic() - exchange.started
            self._histograms["e2e_request_latency_seconds"].labels(exchange.model).observe(seconds)
            self._histograms["request_prompt_tokens"].labels(exchange.model).observe(exchange.prompt_tokens)
            self._histograms["request_generation_tokens"].labels(exchange.model).observe(exchange.completion_tokens)

    def page(self, num_running: int) -> bytes:
        """All of it in Prometheus' text format, with `num_running` requests under way."""
        self._running.set(num_running)
        return generate_latest(self._registry)

    def _path(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((shown for begin, shown in self._under.items() if path.startswith(begin)), OTHER)

    def _key(self, name: str) -> str:
        if name not in self._keys:
            if len(self._keys) >= MAX_KEYS:
                return OTHER
            self._keys.add(name)
        return name
