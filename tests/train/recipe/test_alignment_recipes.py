"""The recipes of docs/align.md run as they stand; here from a tiny checkpoint, and for a single step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.reward import save_reward
from penjing.core.config import read_recipe
from penjing.core.models.reward import RewardModel
from penjing.core.recipes import recipe_names
from penjing.train.chat.builtin import builtin_rows
from penjing.train.recipe.load import load_train_recipe
from penjing.train.run import train

ROOT = Path(__file__).parents[3]
RECIPES = {
    "smollm2-sft": "loss",
    "smollm2-lora": "loss",
    "smollm2-dpo": "reward_margin",
    "smollm2-reward": "preference_accuracy",
    "smollm2-grpo": "reward",
    "smollm2-ppo": "gold",
    "smollm2-draft": "tokens_a_step",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_needs_nothing_but_the_checkpoint_that_it_begins_with(
    name: str, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENJING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    for begin in ("smollm2", "smollm2-sft"):
        (tmp_path / "build" / begin).symlink_to(tiny_checkpoint)
    if name == "smollm2-ppo":
        (tmp_path / "build/smollm2-reward").mkdir()
        model = RewardModel(open_checkpoint(tiny_checkpoint).config)
        save_reward(tmp_path / "build/smollm2-reward", model, tiny_checkpoint, {})
    recipe = load_train_recipe(ROOT / f"recipes/{name}.toml")
    assert recipe.output == Path("build") / name
    short = ["steps=1", "evaluation.every=1", "evaluation.samples=4", f"output=out/{name}", "device=cpu"]
    short += ["freeze=[]"] if recipe.freeze else []  # the checkpoint has two layers
    results = train(ROOT / f"recipes/{name}.toml", [*short, "data.batch_size=2"])
    assert RECIPES[name] in results
    assert (tmp_path / "out" / name / ("draft.json" if name == "smollm2-draft" else "config.json")).exists()
    assert (tmp_path / "out" / name / "adapter").exists() == (name == "smollm2-lora")
    if recipe.evaluation.prompts:
        samples = [json.loads(line) for line in (tmp_path / f"out/{name}-run/samples.jsonl").open()]
        assert [each["prompt"] for each in samples] == list(recipe.evaluation.prompts)


def test_the_samples_are_sums_that_the_data_does_not_hold() -> None:
    known = {tuple(re.findall(r"\d+", row["prompt"][0]["content"])) for row in builtin_rows("builtin:sums")}
    for name in ("smollm2-sft", "smollm2-lora", "smollm2-dpo"):
        prompts = read_recipe(ROOT / f"recipes/{name}.toml")["evaluation"]["prompts"]
        assert not known & {tuple(re.findall(r"\d+", prompt)) for prompt in prompts}


def test_each_of_them_comes_with_penjing() -> None:
    assert set(RECIPES) <= set(recipe_names())
