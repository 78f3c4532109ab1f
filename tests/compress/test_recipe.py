"""Recipes with steps: strict, in a sensible order, with rounds written out and milder repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.compress.plan import Planned, milder, plan, stretches
from penjing.compress.recipe import Guard, Recipe, load_recipe, recipe_toml
from penjing.compress.steps.base import Step
from penjing.compress.steps.prune import Prune
from penjing.core.errors import ConfigError

HEAD = 'model = "m"\noutput = "o"\n'
PRUNE = '[[steps]]\nkind = "prune"\nratio = 0.3\n'
DISTILL = '[[steps]]\nkind = "distill"\nsteps = 5\n'
FINETUNE = '[[steps]]\nkind = "finetune"\nsteps = 5\n'
SPARSIFY = '[[steps]]\nkind = "sparsify"\nsteps = 5\nstrength = 0.1\n'


def read(folder: Path, text: str, *overrides: str) -> Recipe:
    path = folder / "recipe.toml"
    path.write_text(HEAD + text)
    return load_recipe(path, list(overrides), family="decoder")


def test_a_recipe_of_another_stage_is_named_with_its_command(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('steps = 5\noutput = "o"\n[model]\narchitecture = "decoder"\n')
    with pytest.raises(ConfigError, match=r"train.toml is a recipe of 'penjing train', not of 'penjing compress'"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (PRUNE, "steps.0.ratio=0", r"steps.0.ratio: input should be greater than 0 \(got 0\)"),
        (PRUNE, "steps.0.ratio=1", r"steps.0.ratio: input should be less than 1 \(got 1\)"),
        (PRUNE, "steps.0.ratio=-0.5", r"steps.0.ratio: input should be greater than 0"),
        (PRUNE, "steps.0.raito=0.2", r"unknown key 'steps.0.raito'; did you mean 'ratio'\? Valid keys: .*rounds"),
        (PRUNE + DISTILL, "steps.1.ratio=0.2", r"unknown key 'steps.1.ratio'.*Valid keys: .*teacher"),
        (
            PRUNE,
            "steps.0.kind=prunes",
            r"steps.0.kind = 'prunes' is no kind of step; "
            r"use prune, prune_weights, sparsify, window, distill, finetune, quantize",
        ),
        (PRUNE, "guard.otherwise=ignore", r"guard.otherwise: input should be 'stop' or 'skip'"),
        (PRUNE, "guard.perplexity_ratio=0.9", r"guard.perplexity_ratio: .*greater than or equal to 1"),
        ("steps = []", "guard.retries=1", r"steps is empty; add a \[\[steps\]\] section"),
        (DISTILL + PRUNE, "guard.retries=1", r"steps.0: nothing was changed before this distill"),
        (PRUNE + SPARSIFY, "guard.retries=1", r"steps.1: no prune follows this sparsify"),
        (PRUNE + FINETUNE, "steps.1.teacher=other", r"unknown key 'steps.1.teacher'.*Valid keys: "),
        (
            '[[steps]]\nkind="prune"\nrounds=2\ntarget={macs=0.5}\n',
            "guard.retries=1",
            r"steps.0: rounds=2 divides a ratio of units",
        ),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(tmp_path: Path, text: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        read(tmp_path, text, override)
    assert "\n" not in str(found.value)


def test_a_distill_with_a_teacher_and_a_finetune_may_come_first(tmp_path: Path) -> None:
    read(tmp_path, DISTILL + PRUNE, "steps.0.teacher=other")
    read(tmp_path, FINETUNE + PRUNE)


def test_guards_stand_after_healing_and_at_the_end(tmp_path: Path) -> None:
    recipe = read(tmp_path, FINETUNE + PRUNE + DISTILL + PRUNE)
    planned = plan(recipe.steps)
    assert [each.name for each in planned] == ["01-finetune", "02-prune", "03-distill", "04-prune"]
    assert [len(stretch) for stretch in stretches(planned)] == [1, 2, 1]
    changed = read(
        tmp_path, FINETUNE + PRUNE + DISTILL + PRUNE, "steps.0.guard=false", "steps.1.guard=true", "steps.2.guard=false"
    )
    assert [len(stretch) for stretch in stretches(plan(changed.steps))] == [2, 2]
    sparse = read(tmp_path, SPARSIFY + PRUNE + DISTILL)
    assert [len(stretch) for stretch in stretches(plan(sparse.steps))] == [3]
    last = read(tmp_path, PRUNE + FINETUNE, "steps.1.guard=false")
    assert [each.guarded for each in plan(last.steps)] == [False, False]
    assert [len(stretch) for stretch in stretches(plan(last.steps))] == [2]


@given(ratio=st.floats(0.01, 0.95), rounds=st.integers(1, 12))
def test_rounds_together_remove_the_ratio(ratio: float, rounds: int) -> None:
    planned = plan((Prune(ratio=ratio, rounds=rounds),))
    stays = 1.0
    for each in planned:
        assert isinstance(each.step, Prune)
        assert each.step.ratio is not None
        stays *= 1 - each.step.ratio
    assert len(planned) == rounds
    assert stays == pytest.approx(1 - ratio, abs=1e-6)


def test_rounds_repeat_what_heals_and_nothing_after(tmp_path: Path) -> None:
    recipe = read(tmp_path, PRUNE + DISTILL + FINETUNE + PRUNE + PRUNE, "steps.0.rounds=2", "steps.3.rounds=2")
    planned = plan(recipe.steps)
    assert [each.step.kind for each in planned] == ["prune", "distill"] * 2 + ["finetune"] + ["prune"] * 3
    assert [each.number for each in planned] == list(range(1, 9))
    assert [each.place for each in planned] == [0, 1, 0, 1, 2, 3, 3, 4]


def stretch_of(*steps: Step) -> list[Planned]:
    return [Planned(number, number - 1, step, False) for number, step in enumerate(steps, 1)]


def test_milder_goes_down_to_the_floor_and_ends() -> None:
    guard = Guard(milder=0.5, floor=0.1)
    stretch: list[Planned] | None = stretch_of(Prune(ratio=0.5))
    ratios = []
    while stretch is not None:
        assert isinstance(stretch[0].step, Prune)
        ratios.append(stretch[0].step.ratio)
        stretch = milder(stretch, guard)
    assert ratios == [0.5, 0.25, 0.125, 0.1]


def test_milder_of_targets_and_layers(tmp_path: Path) -> None:
    def once(text: str) -> Prune | None:
        found = milder(list(plan(read(tmp_path, '[[steps]]\nkind="prune"\n' + text).steps)), Guard())
        return found[0].step if found is not None else None  # type: ignore[return-value]

    assert once("target={macs=0.5}").target.quantity() == ("macs", 0.75)  # type: ignore[union-attr]
    assert once("target={parameters=1e6}") is None
    assert once('parts=["layers"]\nlayers=5').layers == 2  # type: ignore[union-attr]
    assert once('parts=["layers"]\nlayers=[9, 3, 4]').layers == (9,)  # type: ignore[union-attr]
    assert once('parts=["layers"]\nlayers=1') is None


def test_the_recipe_written_out_is_the_recipe(tmp_path: Path) -> None:
    text = '[guard]\nretries = 1\n[data]\ntokens = 512\n[[steps]]\nkind="prune"\ntarget={macs=0.5}\n' + DISTILL
    recipe = read(tmp_path, text, "steps.1.guard=true")
    path = tmp_path / "again.toml"
    path.write_text(recipe_toml(recipe))
    assert load_recipe(path, family="decoder") == recipe
