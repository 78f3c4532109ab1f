"""Averaged weights of runs that go on with other settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from penjing.core.errors import InputError
from penjing.train.optim.optimizer import AveragedWeights
from penjing.train.run import train


def test_the_average_of_what_was_frozen_begins_with_its_weight() -> None:
    before = nn.Linear(2, 2)
    before.weight.requires_grad_(False)
    state = AveragedWeights(before, 0.5).state_dict()
    after = nn.Linear(2, 2)
    average = AveragedWeights(after, 0.5)
    with torch.no_grad():
        after.weight.fill_(7.0)
    average.load_state_dict(state)
    loaded = average.state_dict()
    assert loaded["weight"].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert not loaded["weight"].requires_grad
    assert torch.equal(loaded["bias"], before.bias)


def test_a_run_goes_on_with_less_of_it_frozen(recipe: Path, tmp_path: Path) -> None:
    train(recipe, ["average=0.5", "freeze=['model.embed_tokens.*']"], until=4)
    train(recipe, ["average=0.5", "learning_rate.peak=0.01"], resume="auto", accept_changes=True)
    frozen = load_file(tmp_path / "out-run/checkpoints/step-000000004/state.safetensors")
    name = "model.embed_tokens.weight"
    assert f"average/{name}" not in frozen
    assert not torch.equal(load_file(tmp_path / "out/model.safetensors")[name], frozen[f"model/{name}"])


def test_a_run_does_not_begin_to_average_midway(recipe: Path) -> None:
    train(recipe, ["evaluation.every=0"], until=4)
    changed = ["evaluation.every=0", "average=0.5"]
    with pytest.raises(
        InputError, match=r"^average: the saved run and this one differ in whether weights are averaged"
    ):
        train(recipe, changed, resume="auto", accept_changes=True)
