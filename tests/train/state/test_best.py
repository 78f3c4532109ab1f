"""The best evaluation: by which values one is better, and what is never best."""

from __future__ import annotations

import math

import pytest

from penjing.core.errors import ConfigError
from penjing.train.state.best import Best


@pytest.mark.parametrize(("goal", "values", "best"), [("lowest", (3, 1, 2), 2), ("highest", (1, 3, 2), 2)])
def test_the_best_stays(goal: str, values: tuple[int, ...], best: int) -> None:
    judge = Best("loss", goal, 0, None)
    assert [judge.judge(step, {"loss": value}) for step, value in enumerate(values, 1)] == [True, True, False]
    assert judge.step == best


@pytest.mark.parametrize("nothing", [{"loss": math.nan}, {"other": 1.0}])
def test_an_evaluation_without_a_number_is_never_best(nothing: dict[str, float]) -> None:
    judge = Best("loss", "lowest", 2, None)
    if "loss" in nothing:
        assert not judge.judge(1, nothing)
    else:
        with pytest.raises(ConfigError, match="'loss' is not measured; an evaluation has other"):
            judge.judge(1, nothing)
    assert judge.judge(2, {"loss": 5.0})
    assert not judge.judge(3, nothing)
    assert not judge.is_over
    assert not judge.judge(4, nothing)
    assert judge.is_over
    assert judge.step == 2
