"""Problems of reasoning-gym: what is asked and how answers are scored, by the package itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.progress import Silent
from penjing.train.align.prompts import Answer, Prompt, Sampled
from penjing.train.align.reasoning import ReasoningTasks
from penjing.train.families.base import build_task
from penjing.train.recipe.align import PromptConfig
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train
from tests.train.align.test_rollouts import records

RECIPE = """
output = "{folder}/out"
initial = "{base}"
steps = 1
device = "cpu"

[prompts]
kind = "reasoning-gym"
tasks = {{chain_sum = 3.0, letter_counting = 1.0}}
settings = {{chain_sum = {{max_terms = 2, max_digits = 1}}}}
count = 20
held_out = 0.2

[data]
kind = "rollouts"
batch_size = 2
samples = 2
max_tokens = 4

[reward]
kind = "verifier"

[learning_rate]
peak = 1e-3

[precision]
mode = "fp32"

[evaluation]
every = 1

[monitor]
every = 1
tensorboard = false
"""


@pytest.fixture
def recipe(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    path = tmp_path / "reasoning.toml"
    path.write_text(RECIPE.format(folder=tmp_path, base=tiny_checkpoint))
    return path


def tasks(**values: object) -> ReasoningTasks:
    return ReasoningTasks(PromptConfig.model_validate({"kind": "reasoning-gym", **values}))


@pytest.fixture(scope="module", autouse=True)
def gym() -> Any:
    """Imported here: it takes a second, and one of two workers needs it."""
    return pytest.importorskip("reasoning_gym")


def test_problems_are_those_of_the_package_and_the_same_each_time(gym: Any) -> None:
    found = [row for _, row in tasks(tasks={"chain_sum": 3, "letter_counting": 1}, count=8).rows()]
    assert [row["task"] for row in found] == ["chain_sum"] * 6 + ["letter_counting"] * 2
    theirs = gym.create_dataset("chain_sum", seed=0, size=6)
    assert [(row["prompt"], row["answer"]) for row in found[:6]] == [(x["question"], x["answer"]) for x in theirs]
    assert found == [row for _, row in tasks(tasks={"chain_sum": 3, "letter_counting": 1}, count=8).rows()]
    other = tasks(tasks={"chain_sum": 1}, settings={"chain_sum": {"seed": 7}}, count=6).rows()
    assert [row["prompt"] for _, row in other] != [row["prompt"] for row in found[:6]]


def test_answers_are_scored_by_the_task() -> None:
    scorer = tasks(tasks={"chain_sum": 1.0}, count=2)
    row = next(scorer.rows())[1]
    right = row["answer"]
    said = [right, f"{right}.0 ", f"I think <answer>\n{right}\n</answer>.", f"{right}{right}", ""]
    answers = [Answer(Sampled(), text) for text in said]
    assert scorer(Prompt([1], row), answers)[:3] == [1.0, 1.0, 1.0]
    assert max(scorer(Prompt([1], row), answers)[3:]) < 1.0


def test_a_run_asks_them(recipe: Path, tmp_path: Path) -> None:
    results = train(recipe)
    assert 0 <= results["reward"] <= 1
    assert records(tmp_path / "out-run")[0]["length"] > 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["prompts.tasks={chain_sun=1.0}", "prompts.settings={}"],
         "reasoning-gym has no task 'chain_sun'; it has chain_sum"),
        (["prompts.settings={chain_sum={terms=2}}"], "prompts.settings.chain_sum: 'terms' is unknown; it has min_t"),
        (["prompts.settings={chain_sum={min_terms=9}}"], "prompts.settings.chain_sum: max_terms must be >= min_terms"),
        (["prompts.settings={chain_sum={min_terms='x'}}"], "prompts.settings.chain_sum: "),
        (["prompts.settings={maze={}}"], "prompts.settings: .*has 'maze', which tasks does not name"),
        (["prompts.tasks={}", "prompts.settings={}"], "prompts.tasks: .*names at least one task"),
        (["prompts.tasks={chain_sum=0.0}"], "prompts.tasks: .*a share above 0"),
        (["prompts.sources=['builtin:sums']"], "prompts.sources: .*is of kind = 'rows', not of 'reasoning-gym'"),
        (["prompts={tasks={chain_sum=1.0}}"], "prompts.tasks: .*is of kind = 'reasoning-gym', not of 'rows'"),
        (["prompts={}"], "prompts.sources: .*names what is asked"),
        (["prompts={sources=['builtin:sums']}", "reward.check=task"],
         "reward.check = 'task' is of prompts.kind = 'reasoning-gym'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_error(recipe: Path, settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_task(load_train_recipe(recipe, settings), Silent())


def test_a_task_that_fails_is_named(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = tasks(tasks={"chain_sum": 1.0}, count=2)
    row = next(scorer.rows())[1]
    kind = type(gym.create_dataset("chain_sum", seed=0, size=2))

    def fails(*_: object, **__: object) -> float:
        raise ValueError("no scores today")

    monkeypatch.setattr(kind, "score_answer", fails)
    with pytest.raises(InputError, match=r"scorer of reasoning-gym's task 'chain_sum' fails at the answer '7'"):
        scorer(Prompt([1], row), [Answer(Sampled(), "7")])
    monkeypatch.setattr(kind, "__getitem__", fails)
    with pytest.raises(InputError, match="reasoning-gym fails at problem 0 of 'chain_sum'"):
        next(scorer.rows())


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(SetupError, match=r"needs the package reasoning_gym: pip install 'penjing\[reasoning\]'"):
        tasks(tasks={"chain_sum": 1.0})
