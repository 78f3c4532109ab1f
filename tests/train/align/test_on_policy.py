"""Learning from a teacher on a model's own answers: the divergence beside torch's, what a run reaches, and what it
refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F

from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.train.families.base import build_task
from penjing.train.objective.on_policy import Divergence, divergences
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from tests.conftest import write_tiny_checkpoint
from tests.train.align.test_rollouts import records

RECIPE = """
output = "{folder}/out"
initial = "{base}"
steps = 12
device = "cpu"
seed = 1

[prompts]
sources = ["builtin:sums"]
held_out = 0.1

[data]
kind = "rollouts"
batch_size = 12
samples = 1
max_tokens = 4

[algorithm]
kind = "distill"
teacher = "{teacher}"

[learning_rate]
kind = "constant"
peak = 2e-3

[precision]
mode = "fp32"

[evaluation]
every = 12
samples = 4

[monitor]
every = 1
tensorboard = false
"""


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    teacher = write_tiny_checkpoint(tmp_path / "teacher", seed=7)
    path = tmp_path / "distill.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_checkpoint, teacher=teacher))
    return path


@pytest.mark.parametrize("kind", get_args(Divergence))
def test_divergences_and_gradients_are_torchs(kind: Divergence) -> None:
    torch.manual_seed(0)
    mine, theirs = (3 * torch.randn(7, 31, dtype=torch.float64) for _ in range(2))
    mine.requires_grad_(True)
    found = divergences(mine, theirs, kind, temperature=0.7)
    p, q = (each.div(0.7).log_softmax(-1) for each in (mine, theirs))
    over, under = (p, q) if kind == "reverse" else (q, p)
    expected = F.kl_div(under, over, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((found * weight).sum(), mine), torch.autograd.grad((expected * weight).sum(), mine)
    )


def test_a_model_comes_nearer_to_its_teacher(recipe: Path, tmp_path: Path) -> None:
    results = train(recipe)
    steps = records(tmp_path / "out-run")
    first, last = (sum(each["divergence"] for each in some) / 3 for some in (steps[:3], steps[-3:]))
    assert last < 0.85 * first
    assert results["loss"] == pytest.approx(results["divergence"])
    assert max(each["gap"] for each in steps) < 1e-4
    assert not any("reward" in each for each in steps)
    answers = [json.loads(line) for line in (tmp_path / "out-run" / "answers.jsonl").read_text().splitlines()]
    assert {"step", "prompt", "answer"} == set(answers[0])  # what was not judged has no reward, neither 0


def test_a_model_is_no_way_from_itself(recipe: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    given = [f"algorithm.teacher={tiny_checkpoint}", "algorithm.divergence=forward", "reward={kind='verifier'}"]
    train(recipe, [*given, "steps=1", "evaluation.every=0"])
    (only,) = records(tmp_path / "out-run")
    assert only["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert "reward" in only  # is recorded where it is asked for


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["algorithm={kind='distill'}"], "algorithm.teacher: .*is the checkpoint that kind = 'distill' learns from"),
        (["algorithm.kind=grpo"], "algorithm.teacher: .*is of kind = 'distill', not of 'grpo'"),
        (["algorithm.kl=0.1"], "algorithm.kl: .*not of 'distill'"),
        (["algorithm.scale=batch"], "algorithm.scale: .*'distill' has none of"),
        (["algorithm={kind='grpo'}"], "reward: .*is needed with data.kind = 'rollouts'"),
    ],
)
def test_what_cannot_be_meant_is_one_error(recipe: Path, settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_task(load_train_recipe(recipe, settings), Silent())


def test_teachers_that_do_not_fit_are_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.teacher = .*nowhere is no checkpoint with a tokenizer"):
        train(recipe, [f"algorithm.teacher={tmp_path}/nowhere"])
    other = write_tiny_checkpoint(tmp_path / "other", pre="smollm")
    with pytest.raises(ConfigError, match=r"algorithm.teacher = .* has another tokenizer than initial"):
        train(recipe, [f"algorithm.teacher={other}"])
