"""`penjing train simulate` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.core import cli
from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError
from penjing.train.pipeline.shape import decoder_shape
from penjing.train.plan.simulation import simulate_recipe
from penjing.train.recipe.recipe import TrainRecipe

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"])
def test_it_is_near_the_formula_where_sends_are_cheap(schedule):
    result = simulate_recipe(RECIPES / "decoder-1b.toml", ["model.num_hidden_layers=64"], stages=4, schedule=schedule)
    assert result["formula_for_equal_stages"] <= result["by_cost"]["bubble"] + 1e-4
    # the head, as heavy as a layer and more, is the difference
    heaviest = result["by_cost"]["heaviest_stage_over_mean"]
    assert result["by_cost"]["bubble"] < result["formula_for_equal_stages"] + (heaviest - 1) + 0.02
    assert result["by_cost"]["step_s"] <= result["equal"]["step_s"]


def test_the_command_writes_a_table_json_and_a_figure(tmp_path, capsys):
    out, report = tmp_path / "line.svg", tmp_path / "line.json"
    arguments = ["train", "simulate", str(RECIPES / "decoder-1b.toml"), "--stages", "4", "--schedule", "zbv"]
    assert cli._run([*arguments, "--out", str(out), "--json", str(report)]) == 0
    printed = capsys.readouterr()
    assert "by_cost.bubble" in printed.err
    assert json.loads(report.read_text())["ranks"] == 4
    figure = out.read_text()
    assert figure.startswith("<?xml")
    for label in ("forward", "backward, weights", "zbv, 4 ranks"):
        assert label in figure


def test_measured_layers_of_this_machine():
    small = ["model.hidden_size=64", "model.head_dim=32", "model.num_attention_heads=2", "data.sequence_length=32"]
    result = simulate_recipe(
        RECIPES / "decoder-tiny.toml", small, stages=2, schedule="1f1b", micro_batches=4, measure=True
    )
    assert result["costs"].startswith("measured here")
    assert 0 < result["by_cost"]["bubble"] < 1


def test_more_stages_than_layers_is_said(capsys):
    assert cli._run(["train", "simulate", str(RECIPES / "decoder-tiny.toml"), "--stages", "8"]) == 0
    assert "6 layers are fewer than 8 stages: each is cut into 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stages", "4", "--schedule", "2f2b"], "schedule '2f2b' is unknown; choose one of gpipe"),
        (["--stages", "4", "--micro-batches", "3"], "as many micro-batches as ranks"),
        (["--stages", "4", "--schedule", "zbv", "--chunks", "3"], "has 2 chunks a rank, not 3"),
        (["--stages", "2", "--device", "abacus"], "device 'abacus' is unknown; choose one of a100"),
        (["--stages", "2", "--out", "line.pdf"], "ends in .svg"),
        (["--stages", "0"], "--stages"),
    ],
)
def test_wrong_numbers_are_one_line(arguments, message, capsys):
    assert cli._run(["train", "simulate", str(RECIPES / "decoder-tiny.toml"), *arguments]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_large_recipe_is_what_it_says():
    recipe = load_recipe(TrainRecipe, RECIPES / "decoder-1b.toml")
    assert decoder_shape(recipe.model).parameters == pytest.approx(1.04e9, rel=0.01)
