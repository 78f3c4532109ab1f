"""/metrics of the front: what Prometheus gets of the server behind it."""

from __future__ import annotations

import asyncio

import pytest

from penjing.serve.bench.open_loop import bench_open_loop
from penjing.serve.front.figures import read_figures
from penjing.serve.gate.errors import ApiError
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import free_ports


@pytest.mark.server
@pytest.mark.xdist_group("front")
def test_the_servers_figures_come_through_the_front(front: Fronted) -> None:
    answer = front.ask("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.body.decode().splitlines()
    assert any(line.startswith('penjing:num_requests_running{model="llm"} ') for line in lines)
    assert all(line[0] == "#" or line.rsplit(" ", 1)[1] for line in lines)
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
