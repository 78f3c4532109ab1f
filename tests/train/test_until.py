"""A run that pauses, and goes on as if it had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from penjing.core.errors import ConfigError
from penjing.train.loop import Evaluation, Trainer
from penjing.train.objective.objective import CrossEntropy
from penjing.train.run import train
from penjing.train.state.best import Best
from tests.train.conftest import ListStream


def test_a_paused_run_goes_on_to_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"output={tmp_path}/whole"])
    paused = train(recipe, until=3)
    assert not (tmp_path / "out").exists()
    records = [json.loads(line) for line in (tmp_path / "out-run/metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records) == 3
    judged = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert judged == [paused["loss"]]  # step 3 is none that evaluation.every names
    assert train(recipe, resume="auto", until=3) == paused
    assert train(recipe, resume="auto", until=100) == whole
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


class Followed:
    """A run of 12 steps, evaluated every four, that notes which evaluations are shown, heard and judged."""

    def __init__(self, metric: str = "loss") -> None:
        self.shown: list[int] = []
        self.heard: list[int] = []
        self.best = Best(metric, "lowest", 0, None)
        model = nn.Linear(4, 3)
        batch = {"images": torch.randn(5, 4), "targets": torch.tensor([0, 1, 2, 0, 1])}
        objective = CrossEntropy("images")
        self.trainer = Trainer(
            model, objective, ListStream([batch]), torch.optim.SGD(model.parameters(), 0.1), 12, best=self.best,
            evaluation=Evaluation(lambda: [batch], objective, 4, hear=self.hear, show=self.shown.append),
        )  # fmt: skip

    def hear(self, results: dict[str, float]) -> dict[str, float]:
        self.heard.append(self.trainer.step)
        return {}

    def until(self, step: int) -> None:
        self.trainer.pause_at = step
        self.trainer.fit()


def test_the_last_evaluation_is_judged_too() -> None:
    run = Followed()
    results = run.trainer.fit()
    assert run.shown == run.heard == [4, 8, 12]
    assert run.best.step == 12  # each is better than the one before
    assert run.best.results == results
    with pytest.raises(ConfigError, match="'acuracy' is not measured"):
        Followed("acuracy").until(12)


def test_a_pause_shows_an_evaluation_and_counts_it_only_where_it_is_due() -> None:
    run = Followed()
    run.until(6)
    assert run.shown == [4, 6]
    assert run.heard == [4]
    assert run.best.step == 4
    run.until(8)
    assert run.shown == [4, 6, 8]
    assert run.heard == [4, 8]
    assert run.best.step == 8
