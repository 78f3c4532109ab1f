"""A decoder's quantize step: strict keys, checked values, a key of what matters, TOML that reads back."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.compress.quantizers.decoder import DecoderQuantize
from penjing.compress.recipe import Recipe, load_recipe, recipe_toml
from penjing.core.config import key_of
from penjing.core.errors import ConfigError

RECIPES = Path(__file__).parents[3] / "recipes"


def recipe(**step: object) -> Recipe:
    values = {"model": "in", "output": "out", "steps": [{"kind": "quantize", **step}]}
    return load_recipe(values, family="decoder")


def in_the_repository(*overrides: str) -> Recipe:
    return load_recipe(RECIPES / "smollm2-int8.toml", list(overrides), "decoder")


def quantize(loaded: Recipe) -> DecoderQuantize:
    (step,) = loaded.steps
    assert isinstance(step, DecoderQuantize)
    return step


def test_the_recipe_in_the_repository_is_valid_and_makes_everything_int8() -> None:
    step = quantize(in_the_repository())
    assert not step.keeps("lm_head")
    assert not step.keeps("model.layers.3.mlp.down_proj")


def test_an_override_reaches_a_section() -> None:
    step = quantize(in_the_repository("steps.0.lm_head=keep", "steps.0.transform.smooth_down=0.25"))
    assert step.keeps("lm_head")
    assert step.transform.smooth_down == 0.25


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "steps.0.lm_heat=keep",
            "unknown key .steps.0.lm_heat.; did you mean .*keep, keep_dtype, keep_int8, kind, kv_cache, .*lm_head",
        ),
        ("smooth.alpha=0.5", "unknown key 'smooth'.*data, evaluate, guard, measure, model, output, steps"),
        ("steps.0.lm_head=int4", "steps.0.lm_head: input should be 'int8' or 'keep'.*got 'int4'"),
        ("steps.0.transform.smooth_down=1.5", "steps.0.transform.smooth_down.*less than or equal to 1"),
        ("data.tokens=1000", "tokens=1000 is not a multiple of window=512"),
        ("evaluate.code_tokens=100", "code_tokens=100 is not a multiple of window=512"),
    ],
)
def test_wrong_values_name_the_key_and_the_rule(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_the_repository(override)


def test_toml_reads_back_to_the_same_recipe(tmp_path: Path) -> None:
    original = recipe(keep=["*.down_proj", 'odd "name"'], lm_head="keep", transform={"rotate": False})
    (tmp_path / "recipe.toml").write_text(recipe_toml(original))
    assert load_recipe(tmp_path / "recipe.toml", family="decoder") == original


def test_what_decides_the_result_are_settings_and_not_places() -> None:
    base = recipe()
    assert base.model_copy(update={"model": Path("elsewhere"), "output": Path("there")}).settings() == base.settings()
    others = [recipe(lm_head="keep"), recipe(transform={"rotate": False})]
    assert len({key_of(each.settings()) for each in (base, *others)}) == 3
    decided = base.steps[0].decides()
    assert recipe(guard=False, teacher="elsewhere").steps[0].decides() == decided
    assert all(each.steps[0].decides() != decided for each in others)
