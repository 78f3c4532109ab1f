"""The training benchmark on a tiny decoder: every part of it runs and makes the rows it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import run_train
import torch
from lib import train_contestants
from torch import nn

from penjing.core.config import load_recipe
from penjing.core.progress import Silent

TINY = [
    "model.num_hidden_layers=2",
    "model.hidden_size=96",
    "model.intermediate_size=128",
    "model.vocab_size=256",
    "data.sequence_length=32",
    "data.batch_size=4",
]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> run_train.Bench:
    monkeypatch.setattr(run_train, "load_recipe", lambda kind, path: load_recipe(kind, path, TINY))
    return run_train.Bench(tmp_path, 1, Silent())


def test_each_part_makes_its_rows(bench: run_train.Bench) -> None:
    rows = {row.metric: row for row in bench.recomputation() + bench.checkpoints() + bench.loader()}
    assert rows.keys() == {
        "step_recompute_selective",
        "activations_recompute_selective",
        "step_recompute_full",
        "activations_recompute_full",
        "checkpoint_stall",
        "loader",
        "io_wait",
    }
    selective, full = (rows[f"activations_recompute_{name}"].ratio for name in ("selective", "full"))
    assert selective is not None
    assert full is not None
    assert full < selective < 1


def test_contestants_train(bench: run_train.Bench) -> None:
    decoder = bench.bench
    before = decoder.model()
    by_hand = decoder.model()
    images = train_contestants.ImageBench(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 10)), (4, 1, 4, 4))
    contestants = {
        "decoder": train_contestants.steps_of(trainer := decoder.trainer("bf16")),
        "by hand": decoder.plain(by_hand, "bf16"),
        "images": train_contestants.steps_of(images.trainer("fp32")),
        "images by hand": images.plain("fp32"),
    }
    times = train_contestants.interleave(contestants, turns=2, steps=1)
    assert trainer.step == 3
    assert all(seconds > 0 for seconds in times.values())
    for model in (trainer.model, by_hand):
        assert not torch.equal(model.get_parameter("lm_head.weight"), before.lm_head.weight)
