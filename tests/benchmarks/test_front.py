"""The rows of run_front.py from the figures of its rounds, and what it refuses to measure."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from run_front import NEW_TOKENS, check_length, figures_row, front_rows, processor_seconds, tokens_of

from penjing.core.errors import SetupError

EVENTS = b'200\r\n\r\ndata: {"choices":[]}\n\n%sdata: [DONE]\n\n'
USAGE = b'data: {"usage":{"prompt_tokens":3,"completion_tokens":64}}\n\n'


def test_rows_are_medians_beside_the_other_doors() -> None:
    one = {"process": 200.0, "grpc": 160.0, "http": 80.0, "processor": 90.0, "free": 100.0, "schema": 95.0}
    one |= {"joined": 180.0, "first_http": 24.0, "first_grpc": 20.0, "first_added": 3.0}
    rounds = [one, {name: 2 * value for name, value in one.items()}, {name: 9 * value for name, value in one.items()}]
    rows = front_rows(rounds, 5e7)
    found = {(row.metric, row.baseline): (row.value, row.ratio, row.unit, row.runs) for row in rows}
    assert found == {
        ("streams_16_http", "gRPC"): (160, 0.5, "tok/s", 3),
        ("streams_16_http", "in process"): (160, 0.4, "tok/s", 3),
        ("streams_16_grpc", "in process"): (320, 0.8, "tok/s", 3),
        ("streams_16_grpc_joined", "in process"): (360, 0.9, "tok/s", 3),
        ("streams_16_json_schema", "free text over HTTP"): (190, 0.95, "tok/s", 3),
        ("processor_time", None): (180, None, "µs a token", 3),
        ("first_token", "gRPC"): (48, 1.2, "ms", 3),
        ("first_token_added", None): (6, None, "ms", 3),
        ("memory_1000_streams", None): (5e7, None, "bytes", 1),
    }


def test_figures_and_lines_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("run_front.FIGURES_REQUESTS", 3)
    row = figures_row()
    assert (row.metric, row.unit) == ("figures_and_log", "µs a token")
    assert row.value is not None
    assert row.value > 0


def test_an_answer_counts_when_it_is_whole() -> None:
    assert tokens_of(EVENTS % USAGE) == 64
    for cut in (EVENTS % b"", (EVENTS % USAGE)[:-20], b"HTTP/1.1 503 x\r\n\r\n{}", b""):
        with pytest.raises(SetupError, match="did not answer in full"):
            tokens_of(cut)
    check_length(NEW_TOKENS, "HTTP")
    with pytest.raises(SetupError, match="64 tokens were asked for by HTTP, and 63 came"):
        check_length(63, "HTTP")


def test_processor_time_is_that_of_the_process() -> None:
    before = processor_seconds(os.getpid()), time.process_time()
    sum(range(2_000_000))
    used, expected = processor_seconds(os.getpid()) - before[0], time.process_time() - before[1]
    assert used == pytest.approx(expected, abs=0.01)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
        with pytest.raises(SetupError, match="the front has ended"):
            processor_seconds(ended.pid)
