"""/metrics of the front: what Prometheus gets of the server behind it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penjing.serve.access.keys import Key
from penjing.serve.access.limits import Account
from penjing.serve.bench.open_loop import bench_open_loop
from penjing.serve.front.figures import read_figures
from penjing.serve.gate import usage
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange
from penjing.serve.supervisor import state
from tests.serve.front.asking import Fronted
from tests.serve.front.scripted import ScriptedFront
from tests.serve.triton.serving import free_ports


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_the_servers_figures_come_through_the_front(front: Fronted) -> None:
    answer = front.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.decode().splitlines()
    assert any(line.startswith('penjing:num_requests_running{model="llm"} ') for line in lines)
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    assert len(families) == answer.body.count(b"# TYPE ")
    assert {f"penjing:front_{name}" for name in (*usage.HISTOGRAMS, *usage.COUNTERS, usage.RUNNING)} <= set(families)
    assert all(line[0] == "#" or line.rsplit(" ", 1)[1] for line in lines)
    assert {sample.value for sample in families["penjing:model_up"].samples} == {1}
    (longest,) = families["penjing:max_model_len"].samples
    assert [model["max_model_len"] for model in front.ask("/v1/models").json["data"]] == [longest.value]
    assert front.ask("/metrics", {"a": 1}).status == 405


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_a_load_is_answered_or_refused(front: Fronted) -> None:
    found, outcomes = bench_open_loop(f"127.0.0.1:{front.port}", "chat", 8, 1.0, (1.0, 0.1))
    assert found["complete"] > 0
    assert (found["failed"], found["complete"] + found["refused"]) == (0, len(outcomes))
    for outcome in outcomes:
        assert outcome.status == 429 or outcome.tokens == outcome.asked.max_tokens


def test_without_a_server_it_says_so() -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(read_figures(f"127.0.0.1:{free_ports(1)[0]}"))
    assert error.value.status == 503


def samples(page: bytes) -> dict[tuple[str, ...], float]:
    """Values by name and labels, as Prometheus' own reader understands the page."""
    return {
        (
            sample.name.removeprefix("penjing:front_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def exchange(path: str = "/v1/completions", key: str = "", **values: Any) -> Exchange:
    found = Exchange("id", path, model="m", **values)
    found.account = Account(Key(name=key, sha256="0" * 64, created="today")) if key else None
    return found


def test_the_front_counts_and_times() -> None:
    found = usage.Usage(frozenset({"/v1/completions"}))
    answered = exchange(status=200, prompt_tokens=3, completion_tokens=5, key="alice")
    found.first_token(answered, 0.2)
    found.tokens(answered, 4, 0.2)
    found.ended(answered)
    found.ended(exchange(status=429, reason="overloaded", key="alice"))
    found.ended(exchange(status=499))
    values = samples(found.page(2))
    assert values["requests_running",] == 2
    assert values["requests_total", "/v1/completions", "200"] == 1
    assert values["requests_total", "/v1/completions", "499"] == 1
    assert values["requests_refused_total", "overloaded"] == 1
    assert values["time_to_first_token_seconds_bucket", "0.2", "m"] == 1
    assert values["time_to_first_token_seconds_bucket", "0.15", "m"] == 0
    assert values["time_per_output_token_seconds_count", "m"] == 4
    assert values["time_per_output_token_seconds_bucket", "0.05", "m"] == 4
    assert values["e2e_request_latency_seconds_count", "m"] == 1
    assert values["request_prompt_tokens_sum", "m"] == 3
    assert values["request_generation_tokens_sum", "m"] == 5
    assert values["key_requests_total", "alice"] == 2
    assert values["key_generation_tokens_total", "alice"] == 5


def test_a_path_with_a_name_in_it_counts_as_one_path() -> None:
    found = usage.Usage(frozenset({"/v1/models", "/v1/models/{name:path}"}))
    for path in ("/v1/models", "/v1/models/m", "/v1/models/m:1", "/v1/modelsm"):
        found.ended(exchange(path, status=200))
    values = samples(found.page(0))
    assert values["requests_total", "/v1/models", "200"] == 1
    assert values["requests_total", "/v1/models/{name}", "200"] == 2
    assert values["requests_total", usage.OTHER, "200"] == 1


@pytest.fixture
def model_figures() -> Iterator[str]:
    """Where a server gives the figures of a model "m"."""

    class Figures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'# TYPE penjing:max_model_len gauge\npenjing:max_model_len{model="m"} 4096\nnv_cpu 0.5\n')

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Figures) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_model_that_is_down_takes_no_figures_of_the_front_along(model_figures: str) -> None:
    with ScriptedFront() as front:
        assert front.ask("/v1/models").status == 200
        answer = front.ask("/metrics")
        assert answer.status == 200
        values = samples(answer.body)
        assert values["penjing:model_up", "m"] == 0
        assert values["penjing:model_ready", "m"] == 1
        assert values["requests_total", "/v1/models", "200"] == 1
    with ScriptedFront(metrics=model_figures) as front:
        values = samples(front.ask("/metrics").body)
        assert values["penjing:model_up", "m"] == 1
        assert values["nv_cpu",] == 0.5


def test_a_model_says_how_long_its_texts_may_be(model_figures: str) -> None:
    with ScriptedFront(metrics=model_figures) as front:
        assert front.ask("/v1/models").json["data"][0]["max_model_len"] == 4096
        assert front.ask("/v1/models/m").json["max_model_len"] == 4096
    with ScriptedFront() as front:  # nobody knows it
        assert "max_model_len" not in front.ask("/v1/models").json["data"][0]


def test_nobody_can_make_series_without_an_end() -> None:
    found = usage.Usage(frozenset({"/v1/completions"}))
    for number in range(usage.MAX_KEYS + 50):
        found.ended(exchange(f"/{number}", key=f"key{number}", status=404))
    values = samples(found.page(0))
    assert values["requests_total", usage.OTHER, "404"] == usage.MAX_KEYS + 50
    assert values["key_requests_total", usage.OTHER] == 50
    assert len(values) < 4 * usage.MAX_KEYS


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_a_request_has_one_name_in_every_log(front: Fronted) -> None:
    name = "of-the-client-1"
    body = {"model": front.model, "prompt": "ab", "max_tokens": 3, "ignore_eos": True}
    answer = front.ask("/v1/completions", body, headers={"x-request-id": name})
    assert (answer.status, answer.headers["x-request-id"]) == (200, name)
    port = front.served.config.grpc_port
    ours, theirs = lines(state.front_log_path(port), name), lines(state.log_path(port), name)
    assert (ours["status"], ours["completion_tokens"]) == (200, 3)
    assert (theirs["completion_tokens"], theirs["finish_reasons"]) == (3, ["length"])
    assert theirs["prompt_tokens"] == ours["prompt_tokens"]
    assert 0 < theirs["prefill"] <= theirs["first_token"]
    assert theirs["queue"] + theirs["prefill"] + theirs["decode"] <= ours["seconds"] + 1e-3


def lines(path: Path, name: str) -> dict[str, Any]:
    """The line about the request `name`, once it has been written."""
    deadline = time.monotonic() + 10
    while True:
        found = [line for line in path.read_text().splitlines() if f'"{name}"' in line]
        if found or time.monotonic() > deadline:
            return json.loads(found[-1])
        time.sleep(0.05)
