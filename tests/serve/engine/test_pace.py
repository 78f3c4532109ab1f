"""The budget of prompts in a step: it finds the target on a machine of any speed, and comes back from hiccups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.engine.pace import LEAST_TOKENS, Pace
from penjing.serve.engine.request import Request
from penjing.serve.sampling.params import SamplingParams
from tests.serve.tiny import ids_of, run_all, tiny_engine

TARGET, MOST = 0.1, 512


def run(pace: Pace, token_seconds: float, answers_seconds: float, steps: int, num_answers: int = 15) -> list[float]:
    """Seconds of steps of a machine that costs so much; between prompts there are steps without."""
    taken = []
    for step in range(steps):
        if step % 5 == 0:
            pace.observe(0, num_answers, answers_seconds)
        tokens = pace.prompt_tokens(num_answers)
        taken.append(answers_seconds + tokens * token_seconds)
        pace.observe(tokens, num_answers, taken[-1])
    return taken


@given(st.floats(1e-5, 5e-3), st.floats(1e-3, 0.06))
def test_steps_come_to_take_the_target_and_no_longer(token_seconds: float, answers_seconds: float) -> None:
    pace = Pace(TARGET, MOST)
    last = run(pace, token_seconds, answers_seconds, 60)[-1]
    least = answers_seconds + LEAST_TOKENS * token_seconds
    most = answers_seconds + (MOST - 15) * token_seconds
    assert min(max(least, 0.8 * TARGET), most) - 1e-9 <= last <= max(least, 1.01 * TARGET)


def test_where_nobody_waits_a_step_takes_what_it_can() -> None:
    pace = Pace(TARGET, MOST)
    run(pace, 1e-3, 0.02, 30)
    assert pace.prompt_tokens(0) == MOST
    assert pace.prompt_tokens(15) < 100
    unbounded = Pace(0, MOST)
    run(unbounded, 1e-3, 0.02, 30)
    assert unbounded.prompt_tokens(15) == MOST - 15


def test_a_step_that_the_machine_held_up_is_soon_forgotten() -> None:
    pace = Pace(TARGET, MOST)
    run(pace, 2e-4, 0.02, 40)
    before = pace.prompt_tokens(15)
    pace.observe(before, 15, 30.0)
    assert pace.prompt_tokens(15) > 0.7 * before
    run(pace, 2e-4, 0.02, 20)
    assert pace.prompt_tokens(15) == pytest.approx(before, rel=0.05)


def test_answers_do_not_depend_on_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request("long", list(range(200)), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))]
    requests += [
        Request(f"short {seed}", [seed, 7, 9], SamplingParams(seed=seed, max_tokens=30, ignore_eos=True))
        for seed in range(3)
    ]
    usual = run_all(tiny_engine(), requests)
    sizes = iter([3, 1, 17, 2, 40, 5] * 100)
    monkeypatch.setattr(Pace, "prompt_tokens", lambda self, num_answers: next(sizes))
    slow_engine = tiny_engine()
    slow = run_all(slow_engine, requests)
    assert {name: ids_of(outputs) for name, outputs in slow.items()} == {
        name: ids_of(outputs) for name, outputs in usual.items()
    }
    assert slow_engine.stats().num_steps > 40
