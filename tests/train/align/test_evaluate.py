"""The best of several answers, and what a model reaches on prompts that are held out."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch

from penjing.core import cli
from penjing.core.errors import ConfigError
from penjing.core.progress import Silent
from penjing.train.align.evaluate import best_of, evaluate_answers
from tests.train.align.test_rollouts import recipe  # noqa: F401

VOWELS = ["evaluation.every=1", "evaluation.samples=3"]


@pytest.mark.parametrize("tries", [1, 2, 5, 6])
def test_the_best_of_several_is_the_mean_over_all_choices(tries: int) -> None:
    torch.manual_seed(0)
    rewards = torch.randn(4, 6, dtype=torch.float64)
    rewards[0] = torch.tensor([0.0, 1, 0, 0, 1, 0])
    expected = [
        sum(float(row[list(some)].max()) for some in combinations(range(6), tries))
        / len(list(combinations(range(6), tries)))
        for row in rewards
    ]
    torch.testing.assert_close(best_of(rewards, tries), torch.tensor(expected, dtype=torch.float64))


def test_a_model_answers_what_is_held_out(recipe: Path, tiny_checkpoint: Path) -> None:  # noqa: F811
    found = evaluate_answers(recipe, VOWELS, tiny_checkpoint, 6, Silent())
    assert found["prompts"] == 3
    assert found["samples"] == 6
    tries = [found[f"best_of_{k}"] for k in (1, 2, 4, 6)]
    assert tries == sorted(tries)
    assert tries[0] < tries[-1]
    assert found["best_of_6_error"] >= 0
    assert found == evaluate_answers(recipe, VOWELS, tiny_checkpoint, 6, Silent())


def test_the_command_prints_and_writes_it(recipe: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "found.json"
    flags = ["--model", str(tiny_checkpoint), "--samples", "2", "--set", VOWELS[1], "--json", str(path)]
    assert cli._run(["train", "evaluate", str(recipe), *flags]) == 0
    assert '"best_of_2"' in path.read_text()


def test_a_recipe_without_prompts_to_judge_is_refused(recipe: Path, tiny_checkpoint: Path) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match=r"prompts.held_out = 0 leaves no prompt"):
        evaluate_answers(recipe, ["prompts.held_out=0.0"], tiny_checkpoint, 2, Silent())
    teacher = [f"algorithm={{kind='distill', teacher='{tiny_checkpoint}'}}"]
    text = recipe.read_text()
    recipe.write_text(text[: text.index("[reward]")] + text[text.index("[learning_rate]") :])
    with pytest.raises(ConfigError, match="has no prompts with a reward"):
        evaluate_answers(recipe, teacher, tiny_checkpoint, 2, Silent())
