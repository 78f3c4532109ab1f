"""The best evaluation: by which values one is better, and what is never best."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch

from penjing.core.errors import ConfigError
from penjing.train.state import checkpoint
from penjing.train.state.best import Best
from penjing.train.state.checkpoint import Checkpoints


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


@pytest.mark.parametrize("kept_before", [True, False])
def test_an_evaluation_whose_weights_are_gone_is_forgotten(tmp_path: Path, kept_before: bool) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    before = Best("loss", "lowest", 9, checkpoints if kept_before else None)
    for step, loss in ((4, 3.0), (6, 4.0)):
        if before.judge(step, {"loss": loss}) and before.checkpoints is not None:
            before.checkpoints.save(step, {"model": torch.zeros(1)})
    state = before.state_dict()
    after = Best("loss", "lowest", 9, checkpoints)
    after.load_state_dict(state)
    assert after.step == (4 if kept_before else 0)
    assert after.judge(8, {"loss": 3.5}) is not kept_before
    without = Best("loss", "lowest", 9, None)  # by which patience alone goes
    without.load_state_dict(state)
    assert without.step == 4


def test_a_state_names_no_weights_that_are_not_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), checkpoint.save_tensors
    monkeypatch.setattr(checkpoint, "save_tensors", lambda *args: (gate.wait(10), real(*args))[1])
    best = Best("loss", "lowest", 0, Checkpoints(tmp_path))
    assert best.checkpoints is not None
    best.judge(4, {"loss": 3.0})
    best.checkpoints.save(4, {"model": torch.zeros(1)})
    threading.Timer(0.2, gate.set).start()
    assert best.checkpoints.path(best.state_dict()["step"]).exists()
