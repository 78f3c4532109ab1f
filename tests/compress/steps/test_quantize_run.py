"""A recipe from checkpoint to pruned, trained, served-ready INT8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.compress.recipe import load_recipe
from penjing.compress.report.schema import parse_report
from penjing.compress.run import run_recipe
from penjing.compress.samples import data
from penjing.compress.verify import verify_artifact
from penjing.core.artifact.onnx_classifier import open_classifier_artifact
from penjing.core.errors import ConfigError, InputError
from penjing.train.families import classifier as vision
from tests.compress.quantize.folders import vision_folder
from tests.compress.steps.test_quantize import made_up

ROOT = Path(__file__).parents[3]
RECIPE = """
model = "{folder}/fp32"
output = "{folder}/int8"
[data]
images = 128
[evaluate]
images = 64
resamples = 100
[measure]
rounds = 1
seconds = 0
batches = [4]
[guard]
accuracy_points = 100.0
[[steps]]
kind = "prune"
ratio = 0.25
round_to = 2
[[steps]]
kind = "quantize"
steps = 4
batch_size = 16
device = "cpu"
evaluation_samples = 0
teacher = "{folder}/fp32"
learning_rate = {{ peak = 0.01 }}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vision, "load_fashion", made_up)
    monkeypatch.setattr(data, "load_fashion", made_up)
    vision_folder(tmp_path / "fp32")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


def test_prune_and_train_in_int8(recipe: Path, tmp_path: Path) -> None:
    out = run_recipe(recipe)
    artifact = open_classifier_artifact(out)
    assert artifact.manifest.kind == "artifact"
    assert verify_artifact(out)["differences"][0]["largest"] < 0.1
    stages = json.loads((out / "report.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == ["00-model", "01-prune", "02-quantize"]
    assert stages[2]["size"]["bytes"] == (out / "model.onnx").stat().st_size
    assert stages[2]["size"]["bytes"] < 0.6 * stages[0]["size"]["bytes"]  # small layers: names outweigh numbers
    assert stages[2]["quantized"]["training_steps"] == 4
    assert {row["runtime"] for row in stages[2]["latency"]} == {"onnxruntime"}
    page = (out / "report.html").read_text()
    assert all(f"<code>{row['name']}</code>" in page for row in stages[2]["quantized"]["layers"])
    assert "fake_quantized, onnxruntime</td>" in page
    assert "8.00 bits a weight" in page
    assert run_recipe(recipe) == out
    report = json.loads((out / "report.json").read_text())
    report["stages"][2]["quantized"]["layers"][0]["output"] = "much"
    with pytest.raises(InputError, match=r"report\.json: stages\.2\.quantized\.layers\.0\.output"):
        parse_report(report, "report.json")


def test_quantize_comes_last_and_the_recipe_in_the_repository_is_one(recipe: Path) -> None:
    more = recipe.read_text() + '[[steps]]\nkind = "finetune"\nsteps = 2\n'
    recipe.write_text(more)
    with pytest.raises(ConfigError, match="nothing can follow a quantize"):
        load_recipe(recipe)
    steps = load_recipe(ROOT / "recipes/resnet-fashion-int8.toml", family="classifier").steps
    assert [step.kind for step in steps] == ["prune", "distill", "quantize"]
