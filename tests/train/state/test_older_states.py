"""A run that was begun by an earlier penjing goes on: its state lacks what was added since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penjing.train.loop import Trainer
from penjing.train.run import train

SETTINGS = ["learning_rate.kind=constant", "learning_rate.warmup=0"]
SINCE = ("best",)  # in the state; and of "run" all but the micro-batch


def test_a_state_without_what_was_added_since_is_gone_on_with(
    recipe: Path, tmp_path: Path, losses: Callable[[Path], dict[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(recipe, [*SETTINGS, f"output={tmp_path}/whole"])
    now = Trainer.state_dict

    def then(trainer: Trainer) -> dict[str, Any]:
        state = {name: value for name, value in now(trainer).items() if name not in SINCE}
        return state | {"run": {"micro_batch": trainer.settings["micro_batch"]}}

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "state_dict", then)
        train(recipe, [*SETTINGS, "steps=4"])
    train(recipe, SETTINGS, resume="auto")
    assert losses(tmp_path / "out-run") == losses(tmp_path / "whole-run")
    whole, resumed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
