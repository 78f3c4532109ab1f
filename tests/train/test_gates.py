"""Decoders whose attention has gates learn as others do, whole or by adapters, and what they learnt is served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.train.run import train
from tests.train.test_short_conv import check_answers

GATES = ['model.model_type="penjing"', 'model.attention_gate="channel"', "model.qk_norm=true"]
HEADS = [*GATES, 'model.attention_gate="head"', 'model.attention_gate_function="softplus"']
Losses = Callable[[Path], dict[int, float]]


@pytest.mark.parametrize(
    "changes",
    [
        [*GATES, "steps=40", "learning_rate.peak=0.01"],
        [*HEADS, "precision.mode=hybrid", "memory.recompute=full"],
        [*GATES, "optimizer.name=muon", "precision.mode=bf16", "memory.recompute=selective"],
    ],
    ids=["float32", "hybrid, recomputed", "muon, bf16"],
)
def test_a_recipe_trains_one(recipe: Path, tmp_path: Path, losses: Losses, changes: list[str]) -> None:
    train(recipe, changes)
    curve = losses(tmp_path / "out-run")
    assert curve[max(curve)] < curve[1]
    assert open_checkpoint(tmp_path / "out").config.attention_gate is not None
    check_answers(tmp_path / "out")


def test_adapters_learn_beside_one(recipe: Path, tmp_path: Path) -> None:
    train(recipe, HEADS)
    further = [f"initial={tmp_path}/out", f"output={tmp_path}/next", "adapter.rank=2", "steps=3"]
    train(recipe, [*HEADS, *further])
    before, after = (open_checkpoint(tmp_path / name) for name in ("out", "next"))
    for name in before.tensor_names:
        assert torch.equal(before.get(name), after.get(name)) == ("_proj" not in name), name
    check_answers(tmp_path / "next")
