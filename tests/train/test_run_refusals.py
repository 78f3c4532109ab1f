"""What a training run refuses before it begins: settings, machines and texts that cannot work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import pytest

from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.work import alone_in
from penjing.train.recipe.recipe import TrainRecipe
from penjing.train.run import train, train_task


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (
            ["data.sequence_lenght=3"],
            ConfigError,
            "unknown key 'data.sequence_lenght'; did you mean 'sequence_length'",
        ),
        (["model.hidden=3"], ConfigError, "unknown key 'model.hidden'"),
        (["steps=0"], ConfigError, "a run has one length; set steps above 0, or epochs"),
        (
            ["model.vocab_size=256"],
            ConfigError,
            "have a vocabulary of 320, model.vocab_size is 256; set model.vocab_size = 320",
        ),
        (["data.sequence_length=65"], ConfigError, "more than model.max_position_embeddings=64"),
        (["data.shards=/nonexistent"], InputError, "holds no index.json.*check data.shards"),
        (["data.micro_batch=3"], ConfigError, "batch_size=8 is not a multiple of data.micro_batch=3"),
        (["data.micro_batch=0"], ConfigError, "micro_batch.*must be 1 or more, or 'auto'"),
        (["precision.mode=tf32"], ConfigError, "'tf32' needs an NVIDIA GPU"),
        (["precision.policy=[{match='linears', compute='fp8'}]"], ConfigError, "asks for fp8"),
        (["precision.mode=int4"], ConfigError, "precision.mode"),
        (["device=cuda"], ConfigError, "torch finds no cuda device here"),
        (["memory.limit=100KiB"], ConfigError, "only 0 MiB may be used .memory.limit.; the model alone is too large"),
        (["data.document_mask=true", "compile=true"], ConfigError, "document_mask and compile exclude each other"),
        (['memory.recompute="selective"', "compile=true"], ConfigError, "compile chooses itself what is cheap"),
        (["model.sliding_window=8"], InputError, "sliding_window=8; choose another model_type"),
        (["memory.limit=lots"], ConfigError, "'lots' is no size"),
        (["memory.recompute_rules=[{match='x', recompute='full'}]"], ConfigError, "'x' matches no block"),
        (["initial=/nonexistent"], InputError, "/nonexistent does not exist"),
        (["learning_rate.kind=wsd", "learning_rate.warmup=0.9"], ConfigError, "more than the whole run"),
        (["data.kind=fashion-mnist"], ConfigError, r"unknown key 'data.sequence_length'. Valid keys: batch_size"),
    ],
)
def test_bad_settings_are_one_clear_error(
    recipe: Path, tmp_path: Path, settings: list[str], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as raised:
        train(recipe, settings)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*partial*"))


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("device=cuda", "torch finds no cuda device here"),
        ("precision.mode=tf32", "'tf32' needs an NVIDIA GPU"),
        ("data.micro_batch=3", "batch_size=8 is not a multiple of data.micro_batch=3"),
        ("parallel.dp=2", "parallel.dp=2 × pp=1 × cp=1 × tp=1 needs 2 processes, this run has 1"),
    ],
)
def test_the_machine_is_looked_at_before_any_data(recipe: Path, setting: str, says: str) -> None:
    def build(_: object) -> NoReturn:
        raise AssertionError("data was prepared")

    with pytest.raises(ConfigError, match=says):
        train_task(load_recipe(TrainRecipe, recipe, [setting]), build, command="tests")


def test_two_runs_do_not_train_into_one_folder(recipe: Path, tmp_path: Path) -> None:
    with alone_in(tmp_path / "out-run"), pytest.raises(SetupError, match=r"another process is working in .*/out-run"):
        train(recipe, force=True)
    assert not (tmp_path / "out-run").exists()
    train(recipe)
    (tmp_path / "out-run/own.txt").touch()
    train(recipe, force=True)
    assert not (tmp_path / "out-run/own.txt").exists()


def test_text_too_short_to_evaluate_on_is_refused_before_the_run(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(
        "The end of a single document is held out, and may be shorter than a sequence. " * 20
    )
    settings = [f"data.sources=['{tmp_path / 'one.txt'}']", "data.held_out=0.01", "model.vocab_size=320"]
    text = re.sub(r"shards = .*", "sources = []", recipe.read_text())
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=r"'held_out' .* less than one sequence .* or raise data.held_out"):
        train(recipe, settings)
    assert not (tmp_path / "out-run").exists()
