"""Recipes: strict keys, checked values, a key that changes with what matters, and TOML that reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.compress.decoder.settings import Recipe, recipe_toml, run_key
from penjing.core.config import load_recipe
from penjing.core.errors import ConfigError

RECIPES = Path(__file__).parents[3] / "recipes"


def recipe(**values: object) -> Recipe:
    return Recipe.model_validate({"model": "in", "output": "out"} | values)


def test_the_recipe_in_the_repository_is_valid_and_makes_everything_int8() -> None:
    loaded = load_recipe(Recipe, RECIPES / "smollm2-int8.toml")
    assert not loaded.quantize.keeps("lm_head")
    assert not loaded.quantize.keeps("model.layers.3.mlp.down_proj")


def test_an_override_reaches_a_section(tmp_path: Path) -> None:
    loaded = load_recipe(Recipe, RECIPES / "smollm2-int8.toml", ["quantize.lm_head=keep", "transform.smooth_down=0.25"])
    assert loaded.quantize.keeps("lm_head")
    assert loaded.transform.smooth_down == 0.25


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "quantize.lm_heat=keep",
            "unknown key 'quantize.lm_heat'; did you mean 'lm_head'.*keep, kv_cache, lm_head, rounding",
        ),
        ("smooth.alpha=0.5", "unknown key 'smooth'.*calibration, evaluate, model, output, quantize, transform"),
        ("quantize.lm_head=int4", "quantize.lm_head: input should be 'int8' or 'keep'.*got 'int4'"),
        ("transform.smooth_down=1.5", "transform.smooth_down.*less than or equal to 1"),
        ("calibration.num_tokens=1000", "num_tokens=1000 is not a multiple of window=512"),
        ("evaluate.code_tokens=100", "code_tokens=100 is not a multiple of window=512"),
    ],
)
def test_wrong_values_name_the_key_and_the_rule(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(Recipe, RECIPES / "smollm2-int8.toml", [override])


def test_toml_reads_back_to_the_same_recipe(tmp_path: Path) -> None:
    original = recipe(quantize={"keep": ["*.down_proj", 'odd "name"'], "lm_head": "keep"}, transform={"rotate": False})
    (tmp_path / "recipe.toml").write_text(recipe_toml(original))
    assert load_recipe(Recipe, tmp_path / "recipe.toml") == original


def test_the_key_depends_on_settings_input_and_code_and_not_on_places() -> None:
    base = run_key(recipe(), {"model.safetensors": "1"}, "1")
    assert run_key(recipe(model="elsewhere", output="there"), {"model.safetensors": "1"}, "1") == base
    others = [
        run_key(recipe(quantize={"lm_head": "keep"}), {"model.safetensors": "1"}, "1"),
        run_key(recipe(), {"model.safetensors": "2"}, "1"),
        run_key(recipe(), {"model.safetensors": "1"}, "2"),
    ]
    assert len({base, *others}) == 4
