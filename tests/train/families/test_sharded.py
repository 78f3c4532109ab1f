"""A decoder that sees, on ZeRO and with its decoder's matrices shared: two processes learn what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penjing.core.checkpoint.vision_language import load_vision_language
from penjing.train.run import train
from tests.train.families.test_vision_language import recipe
from tests.train.test_run import finish, launch

__all__ = ["recipe"]
FEW = ["steps=2", "evaluation.every=2", "optimizer.name=sgd"]  # AdamW makes rounding large


@pytest.mark.parametrize(("setting", "named"), [("zero=3", "ZeRO 3"), ("tp=2", "tensor 2")])
def test_two_processes_that_share_parameters_learn_as_one(
    recipe: Path, tmp_path: Path, setting: str, named: str
) -> None:
    train(recipe, FEW)
    shared = [*FEW, f"parallel.{setting}", f"output={tmp_path}/shared"]
    process = launch(recipe, *(flag for setting in shared for flag in ("--set", setting)), processes=2)
    said = finish(process, 200)
    assert process.returncode == 0, said
    assert named in said
    one, other = load_vision_language(tmp_path / "out"), load_vision_language(tmp_path / "shared")
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, atol=1e-6, rtol=1e-5, msg=name)
