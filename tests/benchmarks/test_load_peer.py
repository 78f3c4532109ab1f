"""The server whose times are known, by which load generators are judged."""

from __future__ import annotations

import pytest
from lib import known_server
from lib.known_server import known_figures
from lib.known_server import known_server as started

from penjing.serve.bench.load import Asked
from penjing.serve.bench.open_loop import bench_open_loop

FAST = [Asked(1.0, (), 11), Asked(2.0, (), 1)]


def test_what_is_true_of_a_load_is_counted_from_its_first_request() -> None:
    found = known_figures(FAST)
    assert (found["first_token_p50"], found["per_token_p50"]) == (200, pytest.approx(20))
    assert found["whole_answer_p50"] == pytest.approx((400 + 200) / 2)
    assert found["requests_per_second"] == pytest.approx(2 / 1.2)
    assert found["tokens_per_second"] == pytest.approx(12 / 1.2)


def test_its_answers_are_whole_and_never_faster_than_it_says() -> None:
    with started() as address:
        figures, outcomes = bench_open_loop(address, "chat", 20, 0.2, (2.0, 0.1))
    assert figures["complete"] == len(outcomes) > 0
    for outcome in outcomes:
        assert len(outcome.arrivals) == outcome.tokens
        assert outcome.arrivals[0] >= known_server.FIRST
        assert outcome.end >= known_server.FIRST + known_server.GAP * (outcome.tokens - 1)
