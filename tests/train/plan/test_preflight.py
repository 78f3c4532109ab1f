"""Memory of a rank by the recipe's own settings."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.train import run
from penjing.train.checks import check_machine
from penjing.train.launch.launch import launch
from penjing.train.plan.planner import plan_recipe
from penjing.train.plan.preflight import check_rank_memory, check_recipe, recipe_run
from penjing.train.processes.world import World
from penjing.train.recipe.recipe import TrainRecipe

if TYPE_CHECKING:
    from penjing.train.families.base import Task

LARGE = Path(__file__).parents[3] / "recipes" / "decoder-1b.toml"
GIB = 2**30


def test_a_planned_recipe_needs_what_the_plan_says(tmp_path):
    out = tmp_path / "planned.toml"
    best = plan_recipe(LARGE, gpus=16, memory="80GiB", out=out).best[0]
    recipe = load_recipe(TrainRecipe, out)
    run = recipe_run(recipe, 16)  # dp is left open in the recipe
    assert replace(run, parallel=run.parallel.model_copy(update={"dp": best.run.dp})) == best.run
    assert check_rank_memory(recipe, 16, 80 * GIB) == best.memory


@pytest.mark.parametrize(
    ("overrides", "processes", "limit", "message"),
    [
        ([], 1, 12 * GIB, "the model's state alone is too large: raise parallel.zero"),
        (["data.micro_batch=8"], 1, 30 * GIB, "lower data.micro_batch to"),
        (["parallel.tp=2", "parallel.pp=2"], 9, 80 * GIB, "needs a multiple of 4 processes, this run has 9"),
        ([], 3, 80 * GIB, "data.batch_size=256 is not divisible by the 3"),
        (["data.micro_batch=3"], 1, 80 * GIB, "data.micro_batch=3 does not divide"),
    ],
)
def test_what_does_not_fit_is_one_line(overrides, processes, limit, message):
    recipe = load_recipe(TrainRecipe, LARGE, overrides)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as caught:
        check_rank_memory(recipe, processes, limit)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "precision",
    ["precision.mode=hybrid", 'precision.policy=[{match="softmax", compute="fp32"}]'],
)
def test_a_softmax_of_its_own_is_not_compiled_with_tensor_parallelism(precision):
    alone, compiled = (
        load_recipe(TrainRecipe, LARGE, ["precision.mode=bf16", precision, *more])
        for more in (["parallel.tp=2"], ["parallel.tp=2", "compile=true", "memory.recompute=full"])
    )
    check_recipe(alone, 2)
    with pytest.raises(ConfigError, match=r"parallel\.tp above 1 cannot compute softmax alone .* compile = false"):
        check_recipe(compiled, 2)


def test_only_text_is_counted():
    recipe = load_recipe(TrainRecipe, LARGE.parent / "resnet-fashion.toml")
    with pytest.raises(ConfigError, match="decoders"):
        check_rank_memory(recipe, 1, GIB)


def test_averaged_weights_and_sgd_count():
    needs = [
        check_rank_memory(load_recipe(TrainRecipe, LARGE, overrides), 4, 80 * GIB).optimizer
        for overrides in ([], ["average=0.9"], ["optimizer.name=sgd"])
    ]
    assert needs[1] == 1.5 * needs[0] == 3 * needs[2]


@pytest.mark.parametrize(
    ("overrides", "limit", "advice"),
    [
        ([], "200KiB", r"the model's state alone is too large: raise parallel.zero"),
        (["parallel.zero=3"], "500KiB", r"lower data.micro_batch to \d\d% of it, or recompute"),
        (["parallel.pp=2", "data.micro_batch=1"], "300KiB", "set memory.recompute = 'full', or raise parallel.tp"),
    ],
)
def test_what_cannot_fit_is_refused_before_processes_start(recipe, overrides, limit, advice):
    with pytest.raises(ConfigError, match=rf"a rank needs \d.*, only {limit[:3]}.0 KiB .*memory.limit.*; {advice}"):
        launch(2, recipe, [*overrides, f"memory.limit={limit}"], [])


@pytest.mark.parametrize(
    ("overrides", "num", "reason"),
    [
        (["model.num_hidden_layers=4", "parallel.schedule=interleaved", "data.batch_size=5"], 5, "multiple of"),
        (["parallel.schedule=1f1b", "data.micro_batch=8"], 1, "needs as many micro-batches as ranks"),
        (["parallel.schedule=1f1b", "data.micro_batch=2", "parallel.micro_batches=1"], 1, "as many micro-batches as"),
    ],
)
def test_micro_batches_that_a_schedule_cannot_run_are_refused(recipe, overrides, num, reason):
    given = load_recipe(TrainRecipe, recipe, ["parallel.pp=2", *overrides])
    with pytest.raises(ConfigError, match=rf"cannot run {num} micro-batches of data.micro_batch=\d \(.*{reason}"):
        check_machine(given, 2, is_new=True)
    check_machine(given, 2, is_new=False)


@pytest.mark.parametrize("balance", [False, True])
def test_micro_batches_that_make_no_step_are_refused(recipe, balance):
    overrides = ["parallel.pp=2", "data.batch_size=8", "data.micro_batch=2", f"parallel.balance={str(balance).lower()}"]
    given = load_recipe(TrainRecipe, recipe, [*overrides, "parallel.micro_batches=3"])
    with pytest.raises(
        ConfigError, match=r"micro_batches=3 does not divide the 4 micro-batches .* take one of 1, 2, 4"
    ):
        check_machine(given, 2, is_new=True)
    check_machine(given, 2, is_new=False)  # a run that goes on cuts its batch anew
    check_machine(load_recipe(TrainRecipe, recipe, [*overrides, "parallel.micro_batches=2"]), 2, is_new=True)


@pytest.mark.parametrize(
    ("overrides", "advice"),
    [
        (["data.batch_size=16", "data.micro_batch=8"], "leaves each of 2 a single one; lower it to 1"),
        (
            ["data.batch_size=2", "data.micro_batch=1"],
            "data.batch_size=2 leaves each of 2 a single one; raise it to 16",
        ),
    ],
)
def test_shares_that_nothing_can_be_moved_of_are_refused(recipe, overrides, advice):
    given = load_recipe(TrainRecipe, recipe, [*overrides, "parallel.shares=auto"])
    with pytest.raises(ConfigError, match=rf"parallel.shares = 'auto' moves .*{advice}, or set 'equal'"):
        check_machine(given, 2, is_new=True)
    check_machine(given, 1, is_new=True)  # alone there is nothing to share
    check_machine(given, 2, is_new=False)  # a run that goes on cuts its batch anew


def test_each_process_refuses_it_too(recipe, monkeypatch):
    class Lonely(World):
        def barrier(self):
            pass

        def sum(self, values):
            return values * self.size  # the other one has the same

    @contextmanager
    def join(device, watch):
        yield Lonely(0, 2)

    monkeypatch.setattr(run, "join_world", join)
    monkeypatch.setattr(run, "memory_limit", lambda device, num_local: 200 * 2**10)
    with pytest.raises(ConfigError, match=r"a rank needs .*raise parallel\.zero"):
        run.train(recipe)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["parallel.micro_batches=5"], r"micro_batches=5 does not divide the 8 micro-batches of data.micro_batch=1 "),
        (["parallel.schedule=1f1b", "parallel.micro_batches=1"], r"cannot run 1 micro-batches of .* as many micro-"),
    ],
)
def test_a_run_that_goes_on_is_refused_before_it_builds_a_model(recipe, overrides, reason):
    given = load_recipe(TrainRecipe, recipe, ["parallel.pp=2", "data.batch_size=8", *overrides])
    begun = run._Run(given, cast("Task", None), World(), Silent())  # a task that nobody may ask
    with pytest.raises(ConfigError, match=reason):
        begun._cut({"micro_batch": 8, "shares": 1})
