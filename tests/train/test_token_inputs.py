"""Decoders whose layers take something of tokens, or read others' keys, learn as others do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.train.numerics.compiled import compile_model
from penjing.train.run import train
from tests.train.test_short_conv import check_answers

FIELDS = ['model.model_type="penjing"', "model.token_inputs=16", "model.shared_keys=1", "model.layer_scales=true"]
FIELDS += ["model.value_norm=true", "model.num_hidden_layers=3"]
Losses = Callable[[Path], dict[int, float]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at every tensor
def test_compiled_blocks_hand_keys_on(
    recipe: Path, tmp_path: Path, losses: Losses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penjing.train.run.compile_model", partial(compile_model, backend="aot_eager"))
    train(recipe, [*FIELDS, "steps=3", f"output={tmp_path}/plain"])
    train(recipe, [*FIELDS, "steps=3", "compile=true"])
    plain, compiled = losses(tmp_path / "plain-run"), losses(tmp_path / "out-run")
    assert max(abs(plain[step] - compiled[step]) for step in plain) < 1e-5


def test_adapters_learn_beside_one(recipe: Path, tmp_path: Path) -> None:
    train(recipe, FIELDS)
    further = [f"initial={tmp_path}/out", f"output={tmp_path}/next", "adapter.rank=2", "steps=3"]
    train(recipe, [*FIELDS, *further])
    before, after = (open_checkpoint(tmp_path / name) for name in ("out", "next"))
    for name in before.tensor_names:
        adapted = "_proj" in name and ".token." not in name
        assert torch.equal(before.get(name), after.get(name)) == (not adapted), name
    check_answers(tmp_path / "next")


@pytest.mark.parametrize(
    "changes",
    [["steps=40", "learning_rate.peak=0.01"], ["precision.mode=hybrid", "memory.recompute=full"]],
    ids=["float32", "hybrid, recomputed"],
)
def test_a_recipe_trains_one(recipe: Path, tmp_path: Path, losses: Losses, changes: list[str]) -> None:
    train(recipe, [*FIELDS, *changes])
    curve = losses(tmp_path / "out-run")
    assert curve[max(curve)] < curve[1]
    out = open_checkpoint(tmp_path / "out")
    assert (out.config.token_inputs, out.config.shared_keys) == (16, 1)
    assert float(out.get("model.layers.0.layer_scale")) != 1.0
    check_answers(tmp_path / "out")
