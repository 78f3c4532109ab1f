"""A decoder that sees, on ZeRO and with its decoder's matrices shared: two processes learn what one does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from penjing.core.checkpoint.vision_language import load_vision_language
from tests.train.families.test_vision_language import recipe
from tests.train.parallel.test_aligned import SCRIPT
from tests.train.parallel.worlds import run_world

__all__ = ["recipe"]
FEW = ["steps=2", "evaluation.every=2", "optimizer.name=sgd"]  # AdamW makes rounding large
MESHES = {"ZeRO 3": "zero=3", "tensor 2": "tp=2"}


def test_two_processes_that_share_parameters_learn_as_one(recipe: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "base")
    cases: dict[str, dict[str, Any]] = {
        named: {
            "recipe": recipe.name, "settings": FEW, "mesh": [f"parallel.{setting}"], "folder": setting,
            "resumed": False,
        }
        for named, setting in MESHES.items()
    }  # fmt: skip
    found = run_world(tmp_path, 2, cases, script=SCRIPT)
    one = load_vision_language(tmp_path / MESHES["ZeRO 3"] / "alone")  # the same for both meshes
    for named, setting in MESHES.items():
        assert any(named in line for line in found[named]["mesh"]), found[named]["mesh"]
        other = load_vision_language(tmp_path / setting / "here")
        for name, parameter in one.named_parameters():
            torch.testing.assert_close(
                other.get_parameter(name), parameter, atol=1e-6, rtol=1e-5, msg=f"{name} on {named}"
            )
