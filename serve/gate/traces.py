"""Traces of requests for OpenTelemetry: a span for each, and in it what its first answers did in the engine, sent by
OTLP over HTTP where a collector is named.

OpenTelemetry's own variables say where and how: OTEL_EXPORTER_OTLP_ENDPOINT turns it on, OTEL_EXPORTER_OTLP_HEADERS,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER and others are read by its packages. A request that
comes with `traceparent` (W3C Trace Context) becomes a part of its caller's trace. A span has no text of prompt or
answer, and of a key the name alone; its own names are those of OpenTelemetry's conventions for HTTP and for generative
AI.
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from penjing.core.errors import SetupError
from penjing.serve.gate.guard import ALWAYS_OPEN, Exchange, Message

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables of the environment of which one names the collector, such as http://localhost:4318."""
NEEDS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
SERVICE = "penjing"
CLOSE_SECONDS = 2.0
FAILED = 500
STAGES = ("queue", "prefill", "decode")
MAX_STAGED = 16  # prompts of a request whose answers get spans; further ones say the same


def are_wanted() -> bool:
    """Whether a collector is named."""
    return any(os.environ.get(name) for name in ENDPOINTS)


def check_traces() -> None:
    """Refuse a named collector that nothing could be sent to.

    Raises:
        SetupError: a package is missing.
    """
    if are_wanted() and not all(map(_is_there, NEEDS)):
        raise SetupError(
            f"{ENDPOINTS[1]} is set, which needs OpenTelemetry: pip install 'penjing[traces]', or unset it"
        )


class Traces:
    """Makes a span of each request when it has ended; a thread sends them in batches, and what a collector that is away
    does not take is dropped.

    Args:
        exporter: takes the spans; None sends them to the collector that the environment names.
    """

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE)
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("penjing.front")

    def ended(self, scope: Message, exchange: Exchange) -> None:
        """A request has its answer, or its client has gone; a probe of health makes no span."""
        if exchange.path in ALWAYS_OPEN:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now, took = time.time_ns(), time.monotonic() - exchange.started
        begin = now - int(took * 1e9)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{scope['method']} {_shown(exchange)}",
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(scope, exchange),
            start_time=begin,
        )
        if exchange.first_token is not None:
            span.add_event("first_token", timestamp=begin + int(exchange.first_token * 1e9))
        self._stages(span, begin, exchange)
        if exchange.status >= FAILED:
            span.set_status(Status(StatusCode.ERROR, exchange.reason))
        span.end(now)

    def _stages(self, span: Span, begin: int, exchange: Exchange) -> None:
        """Spans of what the engine says of its answers. It tells how long each stage took; an answer's end is when its
        last piece came here, so that they lie late by what the way takes, a millisecond or so."""
        from opentelemetry.trace import set_span_in_context

        inside = set_span_in_context(span)
        for ended, seconds in exchange.stages[:MAX_STAGED]:
            at = begin + int(1e9 * (ended - sum(seconds)))
            for name, took in zip(STAGES, seconds, strict=True):
                stage = self._tracer.start_span(f"engine {name}", context=inside, start_time=at)
                at += int(1e9 * took)
                stage.end(at)

    def close(self) -> None:
        """Send what is left, for `CLOSE_SECONDS` at most: a collector that is away is asked again and again."""
        thread = threading.Thread(target=self._provider.shutdown, name="penjing-traces", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


def _attributes(scope: Message, exchange: Exchange) -> dict[str, Any]:
    found = {
        "http.request.method": scope["method"],
        "url.path": exchange.path[:200],
        "http.response.status_code": exchange.status,
        "penjing.request.id": exchange.request_id,
        "error.type": exchange.reason,
        "gen_ai.request.model": exchange.model,
        "gen_ai.usage.input_tokens": exchange.prompt_tokens,
        "gen_ai.usage.output_tokens": exchange.completion_tokens,
        "enduser.id": exchange.key,
    }
    return {name: value for name, value in found.items() if value not in ("", 0)}


def _shown(exchange: Exchange) -> str:
    """The path as a span's name: names are few, so one that is not there, or that names a model, is none."""
    if not exchange.model and exchange.status >= 400:
        return "refused"
    return "/v1/models" if exchange.path.startswith("/v1/models/") else exchange.path


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
