"""What every family of networks offers to training, and what is said where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import names_of, table_of
from penjing.core.progress import Silent
from penjing.train.families.base import Family, build_checkpoint_task, build_task
from penjing.train.recipe.data import (
    ChatData,
    FashionData,
    PairData,
    PreferenceData,
    RolloutData,
    SampleData,
    SightData,
    TextData,
)
from penjing.train.recipe.recipe import TrainRecipe

RECIPES = Path(__file__).parents[3] / "recipes"


def test_decoders_classifiers_and_graphs_are_trained() -> None:
    assert names_of("train") == ["decoder", "classifier", "graph", "towers", "vision_language"]
    tables: list[Family] = [table_of("train", name) for name in names_of("train")]
    of_decoders = (TextData, ChatData, PreferenceData, RolloutData)
    assert [table.data for table in tables] == [
        of_decoders,
        (FashionData, SampleData),
        (SampleData,),
        (PairData,),
        (SightData,),
    ]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ('{"model_type": "bert"}', InputError, "networks of the family 'encoder' have no part in train"),
        (
            '{"task": "image-classification"}',
            ConfigError,
            r"data.kind = 'text' does not fit .*; use kind = 'fashion-mnist'",
        ),
        ("{}", InputError, "names no family of networks"),
    ],
)
def test_a_checkpoint_that_cannot_be_trained_so_is_one_line(
    tmp_path: Path, config: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    recipe = load_recipe(TrainRecipe, RECIPES / "decoder-tiny.toml", [f"initial={tmp_path}"])
    with pytest.raises(error, match=message) as caught:
        build_checkpoint_task(tmp_path, recipe, Silent())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("adapter.rank=4", r"\[adapter\] is for decoders, and .* is an image classifier; leave it out"),
        ("balancing.auxiliary_loss=1.0", r"\[balancing\] is for decoders, and .* is an image classifier"),
        ("evaluation.prompts=['hi']", "evaluation.prompts are for decoders, and .* is an image classifier"),
    ],
)
def test_sections_of_decoders_are_refused_for_other_networks(
    tmp_path: Path, is_new: bool, setting: str, says: str
) -> None:
    (tmp_path / "config.json").write_text('{"task": "image-classification"}')
    changes = [setting] if is_new else [setting, f"initial={tmp_path}"]
    recipe = load_recipe(TrainRecipe, RECIPES / "resnet-fashion.toml", changes)
    with pytest.raises(ConfigError, match=says):
        build_task(recipe, Silent())


def test_a_family_is_loaded_when_it_is_asked_for() -> None:
    code = (
        "import sys, penjing.train.run; "
        "print([name for name in sys.modules if name.startswith('penjing.train.families.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "['penjing.train.families.base']"
