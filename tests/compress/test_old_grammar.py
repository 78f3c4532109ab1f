"""Recipes of before 0.2: each is one error, whose text is the same recipe as it is written today."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.recipe import Recipe, load_recipe
from penjing.core.errors import ConfigError
from penjing.core.family import FamilyName
from tests.conftest import ROOT

DECODER = """
model = "build/smollm2"
output = "build/smollm2-int8"
[transform]
rotate = true
smooth_norm = 0.0
smooth_down = 0.6
smooth_output = 0.6
search_steps = 60
[quantize]
lm_head = "int8"
embedding_dtype = "float16"
rounding = "compensated"
keep = []
[calibration]
num_tokens = 6144
code = 0.25
window = 512
[evaluate]
prose_tokens = 8192
code_tokens = 4096
window = 512
"""
ENCODER = """
model = "build/minilm"
output = "build/minilm-int8"
[quantize]
target = "onnxruntime-cpu"
observer = "minmax"
smooth = true
embedding = "int8"
keep = []
[texts]
calibrate = 128
evaluate = 256
[bounds]
cosine = 0.99
parity = 0.99
"""
TRAINED = """
model = "build/smollm2"
output = "build/smollm2-int8-qat"
[evaluate]
prose_tokens = 16384
code_tokens = 16384
window = 512
[guard]
perplexity_ratio = 1.015
[[steps]]
kind = "quantize"
steps = 96
batch_size = 2
sequence_length = 512
sources = ["builtin:calibration"]
learning_rate = { peak = 2e-6, warmup = 0.1 }
optimizer = { weight_decay = 0.0 }
evaluation_samples = 0
checkpoint_every = 24
[steps.int8.transform]
rotate = true
smooth_down = 0.6
smooth_output = 0.6
hadamard_down = 0
[steps.int8.quantize]
lm_head = "int8"
embedding_dtype = "float16"
[steps.int8.calibration]
num_tokens = 6144
window = 512
"""
NEWER = ("zero_points",)  # settings of a step that the older grammar did not have


def today(folder: Path, text: str, family: FamilyName, *overrides: str) -> tuple[str, Recipe]:
    """What the error says before the new spelling, and the recipe that the new spelling is."""
    path, again = folder / "old.toml", folder / "new.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as found:
        load_recipe(path, list(overrides), family=family)
    said, _, spelling = str(found.value).partition("\n\n")
    again.write_text(spelling)
    return said, load_recipe(again, family=family)


@pytest.mark.parametrize(
    ("text", "family", "sections", "name", "newer"),
    [
        (DECODER, "decoder", "[transform], [quantize], [calibration]", "smollm2-int8", {"guard", "measure"}),
        (ENCODER, "encoder", "[quantize], [texts], [bounds]", "minilm-int8", set()),
        (TRAINED, "decoder", "[steps.0.int8]", "smollm2-int8-qat", set()),
    ],
)
def test_the_new_spelling_is_the_recipe_in_the_repository(
    tmp_path: Path, text: str, family: FamilyName, sections: str, name: str, newer: set[str]
) -> None:
    """`newer`: sections that only today's recipe has."""
    said, found = today(tmp_path, text, family)
    assert said == (f"{tmp_path}/old.toml: {sections} are sections of an older grammar. Today the same is written")
    wanted = load_recipe(ROOT / f"recipes/{name}.toml", family=family)
    old, new = (recipe.model_dump(exclude=newer) for recipe in (found, wanted))
    for step in (*old["steps"], *new["steps"]):
        for setting in NEWER:
            step.pop(setting, None)
    assert old == new


def test_samples_of_a_recipe_with_steps_and_of_no_step_at_all(tmp_path: Path) -> None:
    text = 'model = "m"\noutput = "o"\n[calibrate]\nimages = 99\n[[steps]]\nkind = "prune"\nratio = 0.3\n'
    _, found = today(tmp_path, text, "classifier")
    assert found.data.images == 99
    assert [step.kind for step in found.steps] == ["prune"]
    _, found = today(tmp_path, 'model = "m"\noutput = "o"\n[calibration]\nnum_tokens = 512\n', "decoder")
    assert found.data.tokens == 512
    assert [step.kind for step in found.steps] == ["quantize"]


def test_an_override_of_an_older_grammar_is_spelt_anew(tmp_path: Path) -> None:
    """As typed from memory: the settings reach the recipe's own step, beside what it says already."""
    text = (ROOT / "recipes/smollm2-int8.toml").read_text()
    overrides = ("quantize.rounding=nearest", "transform.hadamard_down=64", "calibration.num_tokens=1024")
    said, found = today(tmp_path, text, "decoder", *overrides)
    assert "[transform], [quantize], [calibration] are sections of an older grammar" in said
    (tmp_path / "same.toml").write_text(text)
    new = ["steps.0.rounding=nearest", "steps.0.transform.hadamard_down=64", "data.tokens=1024"]
    assert found == load_recipe(tmp_path / "same.toml", new, family="decoder")


def test_values_that_a_program_gives_are_not_changed() -> None:
    values: dict[str, Any] = tomllib.loads('model = "m"\noutput = "o"\n[[steps]]\nkind = "prune"\nratio = 0.3\n')
    before = tomllib.loads('model = "m"\noutput = "o"\n[[steps]]\nkind = "prune"\nratio = 0.3\n')
    recipe = load_recipe(values, ["steps.0.ratio=0.2", "guard.retries=1"], family="decoder")
    assert values == before
    assert recipe.guard.retries == 1
