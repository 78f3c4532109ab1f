"""Spans of requests, read by OpenTelemetry's own packages, in process and behind the front's own exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from penjing.core.errors import SetupError
from penjing.serve.gate import traces
from penjing.serve.gate.config import FrontConfig
from penjing.serve.gate.guard import Exchange
from penjing.serve.site.app import Front
from penjing.serve.site.process import check_front
from tests.serve.front.test_openapi import front_job, get
from tests.serve.triton.serving import free_ports

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans(*exchanges: Exchange, **headers: str) -> list[Any]:
    exporter = InMemorySpanExporter()
    made = traces.Traces(exporter)
    given = [(name.encode(), value.encode()) for name, value in headers.items()]
    for exchange in exchanges:
        made.ended({"method": "POST", "headers": given}, exchange)
    made.close()
    return list(exporter.get_finished_spans())


def test_a_request_becomes_a_span_of_its_callers_trace() -> None:
    exchange = Exchange("id-1", "/v1/completions", model="m", status=200, prompt_tokens=3, completion_tokens=5)
    exchange.started -= 2.0
    exchange.first_token = 0.5
    (span,) = spans(exchange, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert span.name == "POST /v1/completions"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.0, abs=0.5)
    (event,) = span.events
    assert (event.name, (event.timestamp - span.start_time) / 1e9) == ("first_token", pytest.approx(0.5, abs=1e-3))
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "penjing.request.id": "id-1",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
    }


def test_what_the_engine_did_lies_inside_a_requests_span() -> None:
    exchange = Exchange("id-1", "/v1/completions", model="m", status=200, stages=[(1.5, (0.25, 0.5, 0.7))])
    exchange.started -= 2.0
    queue, prefill, decode, request = spans(exchange)
    assert [span.name for span in (queue, prefill, decode)] == ["engine queue", "engine prefill", "engine decode"]
    assert all(span.parent.span_id == request.context.span_id for span in (queue, prefill, decode))
    at = [(time - request.start_time) / 1e9 for time in (queue.start_time, prefill.start_time, decode.start_time)]
    assert at == pytest.approx([0.05, 0.3, 0.8], abs=1e-3)
    assert (decode.end_time - request.start_time) / 1e9 == pytest.approx(1.5, abs=1e-3)


def test_one_request_makes_no_spans_without_an_end() -> None:
    many = Exchange("a", "/v1/completions", status=200, stages=[(1.0, (0.1, 0.1, 0.1))] * 1000)
    assert len(spans(many)) == 3 * traces.MAX_STAGED + 1


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-0", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_parent_that_is_none_begins_a_trace(parent: str) -> None:
    failed = Exchange("a", "/x" * 300, status=500, reason="internal_error")
    (span,) = spans(failed, Exchange("b", "/health/live", status=200), traceparent=parent)
    assert span.parent is None
    assert (span.name, span.status.status_code) == ("POST refused", StatusCode.ERROR)
    assert len(span.attributes["url.path"]) == 200


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    taken: list[tuple[str, bytes]] = []  # noqa: RUF012 (each test has a class of its own)

    def do_POST(self) -> None:
        self.taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Its address, and what it has been sent."""
    handler = type("Own", (Collector,), {"taken": []})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", handler.taken  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()


def test_the_front_sends_them_to_the_collector_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (address, taken):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        front = Front(front_job(tmp_path))
        assert get(front, "/nothing", traceparent=f"00-{TRACE}-{PARENT}-01")[0] == 404
        assert front._traces is not None
        front._traces.close()
    ((path, body),) = taken
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (span,) = resource.scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("GET refused", TRACE)
    assert {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"] == "penjing"


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setattr(traces, "CLOSE_SECONDS", 0.2)
    made = traces.Traces()
    for number in range(3000):  # more than its queue takes
        made.ended({"method": "GET", "headers": []}, Exchange(str(number), "/v1/models", status=200))
    started = time.monotonic()
    made.close()
    assert time.monotonic() - started < 10


def test_without_a_collector_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in traces.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert Front(front_job(tmp_path))._traces is None


def test_a_missing_package_is_told_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    monkeypatch.setattr(traces, "NEEDS", ("opentelemetry.nothing.here",))
    with pytest.raises(SetupError, match=r"pip install 'penjing\[traces\]'"):
        check_front(FrontConfig(port=8080))
