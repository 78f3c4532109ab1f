"""The benchmark of guessed tokens, on a model of a few thousand parameters."""

from __future__ import annotations

from typing import Any

import pytest
import run_speculation
from run_speculation import Run, measure, run

from penjing.core.errors import ServerError
from penjing.serve.engine.request import Request
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import tiny_engine, tiny_model

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
GROUPS = [[Request("a", [1, 2], PARAMS), Request("b", [3], PARAMS)]]


def test_rows_have_the_ratio_of_rounds_and_tokens_a_row_that_was_not_guessed() -> None:
    loaded = tiny_model()
    off, on = tiny_engine(loaded), tiny_engine(loaded, speculate="lookup")
    speed, each, tokens = measure("16_streams_chat_greedy", GROUPS, off, on, rounds=2)
    assert speed.metric == "16_streams_chat_greedy"
    assert each.metric == "each_of_16_chat_greedy"
    assert tokens.metric == "tokens_a_step_16_chat_greedy"
    assert speed.ratio is not None
    assert speed.ratio > 0
    assert each.ratio is not None
    assert each.ratio > 0
    stats = on.stats()
    own = stats.generation_tokens - stats.spec_decode_num_accepted_tokens
    assert tokens.value == pytest.approx(stats.generation_tokens / own, rel=1e-3)  # rows have four digits
    assert stats.generation_tokens == 3 * 24


def test_answers_of_one_stream_have_no_speed_of_each() -> None:
    engine = tiny_engine()
    speed, tokens = measure("one_stream_chat_greedy", [[each] for each in GROUPS[0]], engine, engine, rounds=1)
    assert (speed.metric, tokens.metric) == ("one_stream_chat_greedy", "tokens_a_step_chat_greedy")


def test_an_answer_ends_when_it_does_and_all_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(run_speculation.time, "perf_counter", lambda: float(next(seconds)))
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (3, 9)]
    found = run(tiny_engine(), [Request(name, [1, 2], each) for name, each in zip("ab", params, strict=True)])
    assert found.num_tokens == 2 + 8
    assert found.seconds_of_each == found.seconds * (2 + 8) / 8


def test_answers_that_differ_make_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = tiny_engine(), []

    def lying(*arguments: Any) -> Run:
        found = run(*arguments)
        calls.append(1)
        return found._replace(answers={**found.answers, "a": [len(calls)]})

    monkeypatch.setattr(run_speculation, "run", lying)
    with pytest.raises(ServerError, match="answers differ"):
        measure("one_stream_chat_greedy", GROUPS, engine, engine, rounds=1)
