"""Rungs of successive halving, and who climbs on."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.errors import ConfigError
from penjing.train.search.halving import Rung, cost, rungs, survivors


def test_a_search_of_sixteen() -> None:
    plan = rungs(16, 75, 4, 1200)
    assert plan == [Rung(75, 16), Rung(300, 4), Rung(1200, 1)]
    assert cost(plan) == 16 * 75 + 4 * 225 + 1 * 900


@pytest.mark.parametrize(
    ("trials", "first", "factor", "steps", "expected"),
    [
        (2, 1, 2, 2, [Rung(1, 2), Rung(2, 1)]),
        (3, 10, 4, 1000, [Rung(10, 3), Rung(1000, 1)]),  # one is left, which goes to the end at once
        (27, 10, 3, 100, [Rung(10, 27), Rung(30, 9), Rung(100, 3)]),  # 90 steps would tell what 100 tell
    ],
)
def test_rungs(trials: int, first: int, factor: int, steps: int, expected: list[Rung]) -> None:
    assert rungs(trials, first, factor, steps) == expected


def test_finalists_run_to_the_end() -> None:
    assert rungs(12, 8, 4, 128, finalists=2) == [Rung(8, 12), Rung(32, 3), Rung(128, 2)]
    assert rungs(16, 75, 4, 1200, finalists=4) == [Rung(75, 16), Rung(1200, 4)]
    assert rungs(2, 1, 4, 10, finalists=2) == [Rung(1, 2), Rung(10, 2)]


@given(st.integers(2, 500), st.integers(1, 50), st.integers(2, 8), st.integers(2, 5000))
def test_rungs_rise_to_the_whole_run_of_ever_fewer(trials: int, first: int, factor: int, steps: int) -> None:
    if first >= steps:
        with pytest.raises(ConfigError, match=f"first = {first} steps is the whole run of {steps}"):
            rungs(trials, first, factor, steps)
        return
    plan = rungs(trials, first, factor, steps)
    assert (plan[0], plan[-1].steps) == (Rung(first, trials), steps)
    for before, after in pairwise(plan):
        assert after.steps > before.steps
        assert 1 <= after.trials <= before.trials
        assert after.trials == max(1, before.trials // factor)
    assert cost(plan) <= trials * steps


def test_the_best_survive_and_the_failed_never() -> None:
    results = {0: 3.0, 1: 1.0, 2: math.inf, 3: math.nan, 4: 1.0, 5: 2.0}
    assert survivors(results, 3, lowest=True) == [1, 4, 5]
    assert survivors(results, 3, lowest=False) == [0, 5, 1]
    assert survivors({0: math.inf, 1: math.nan}, 2, lowest=True) == []
