"""/metrics of the front: what Prometheus gets of the server behind it."""

from __future__ import annotations

import asyncio

import pytest

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


def test_without_a_server_it_says_so() -> None:
    with pytest.raises(ApiError) as error:
        asyncio.run(read_figures(f"127.0.0.1:{free_ports(1)[0]}"))
    assert error.value.status == 503
