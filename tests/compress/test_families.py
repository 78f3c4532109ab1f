"""One command for every family: what it can do gives one kind of folder, what it cannot is one error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penjing.compress.families.base import family
from penjing.compress.report.schema import read_report
from penjing.compress.run import quantize_to_folder, run_recipe
from penjing.compress.samples import data
from penjing.compress.verify import verify_artifact
from penjing.core.errors import ConfigError, InputError
from penjing.core.family import FamilyName
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from tests.compress.graphs import graph_folder
from tests.compress.quantize.folders import image_set, vision_folder
from tests.core.graph.networks import Residual
from tests.core.models.encoders import write_sentence_transformer

FEW: dict[FamilyName, list[str]] = {
    "decoder": [
        "data.tokens=128", "data.window=64", "evaluate.prose_tokens=128", "evaluate.code_tokens=64",
        "evaluate.window=64", "transform.search_steps=2",
    ],
    "classifier": ["data.images=64", "evaluate.images=64"],
    "encoder": ["data.texts=16", "evaluate.texts=16", "parity_bound=0.05", "guard.similarity_loss=0.1"],
}  # fmt: skip
METRICS: dict[FamilyName, str] = {"decoder": "perplexity", "classifier": "accuracy", "encoder": "similarity"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return import_model(str(write_sentence_transformer(folder / "source", layers=1)), folder / "tiny")


@pytest.fixture
def checkpoints(
    tmp_path: Path, tiny_checkpoint: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[FamilyName, Path]:
    monkeypatch.setattr(data, "load_fashion", lambda split, progress: image_set())
    return {"decoder": tiny_checkpoint, "classifier": vision_folder(tmp_path / "resnet"), "encoder": encoder}


def quantize(source: Path, out: Path, *overrides: str, target: str | None = None) -> Path:
    return quantize_to_folder(source, out, target, list(overrides), force=False, progress=Silent())


@pytest.mark.parametrize("name", ["decoder", "classifier", "encoder"])
def test_every_family_is_quantized_by_one_command(
    checkpoints: dict[FamilyName, Path], tmp_path: Path, name: FamilyName
) -> None:
    source, out = checkpoints[name], tmp_path / "int8"
    quantize(source, out, "measure.rounds=0", *FEW[name])
    assert read_manifest(out).kind == "artifact"
    assert verify_artifact(out)["family"] == name
    report = read_report(out)
    assert report.family == name
    assert [stage.name for stage in report.stages] == ["00-model", "01-quantize"]
    assert [stage.quality.name for stage in report.stages] == [METRICS[name]] * 2
    assert [decision.outcome for decision in report.decisions] == ["kept"]
    assert report.command.startswith(f"penjing compress quantize {source} {out} --set ")
    quantized = report.stages[1].quantized
    assert quantized is not None
    assert {row.format for row in quantized.layers} == {"int8"}
    assert quantized.differences
    assert quantized.bound is not None
    assert max(each.mean for each in quantized.differences) < quantized.bound.value
    again = run_recipe(out / "recipe.toml")  # the recipe beside what was made is the same run
    assert again == out
    assert not list(tmp_path.glob(".*"))


def test_a_target_is_the_step_s(checkpoints: dict[FamilyName, Path], tmp_path: Path) -> None:
    out = quantize(
        checkpoints["classifier"], tmp_path / "int8", "measure.rounds=0", *FEW["classifier"], target="onnxruntime-avx2"
    )
    assert json.loads((out / "quantization.json").read_text())["weights"] == "int7"
    assert "--target onnxruntime-avx2" in json.loads((out / "report.json").read_text())["command"]
    with pytest.raises(ConfigError, match=r"the recipe: unknown key 'steps\.0\.target'") as found:
        quantize(checkpoints["decoder"], tmp_path / "decoder", target="onnxruntime-avx2")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "decoder").exists()


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (
            {"kind": "prune", "ratio": 0.3},
            "a text encoder cannot be pruned; a decoder, an image classifier, a graph, a decoder that sees can",
        ),
        (
            {"kind": "finetune", "steps": 2},
            "a text encoder cannot be trained; a decoder, an image classifier, a graph, a decoder that sees can",
        ),
        (
            {"kind": "distill", "steps": 2, "teacher": "encoder"},
            "a text encoder cannot be trained; a decoder, an image classifier, a graph, a decoder that sees can",
        ),
    ],
)
def test_what_a_family_cannot_is_one_error_that_says_who_can(
    checkpoints: dict[FamilyName, Path], tmp_path: Path, step: dict[str, Any], said: str
) -> None:
    source = checkpoints["encoder"]
    if "teacher" in step:
        step = step | {"teacher": str(source)}
    recipe = {"model": str(source), "output": str(tmp_path / "out"), "steps": [step, {"kind": "quantize"}]}
    with pytest.raises(ConfigError) as found:
        run_recipe(recipe)
    assert str(found.value) == f"steps.0: {said}"
    assert not list(tmp_path.glob("*out*"))


def test_each_part_that_a_family_lacks_names_the_families_that_have_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^a text encoder cannot be pruned; a decoder, an image classifier, a graph, a decoder that sees can$",
    ):
        family("encoder").need("pruner", "pruned")
    for name in ("decoder", "classifier", "encoder"):
        assert family(name).need("quantizer", "quantized") is family(name).quantizer


def test_an_encoder_beyond_its_guard_is_not_published_and_goes_on_with_a_larger_budget(
    checkpoints: dict[FamilyName, Path], tmp_path: Path
) -> None:
    small = ["measure.rounds=0", "data.texts=16", "evaluate.texts=16", "parity_bound=0.05"]
    with pytest.raises(InputError, match=r"01-quantize loses too much: .* of similarity lost \(95 %: .*\), budget 0; "):
        quantize(checkpoints["encoder"], tmp_path / "int8", *small, "guard.similarity_loss=0")
    assert not (tmp_path / "int8").exists()
    (made,) = (path for path in (tmp_path / ".int8.work").glob("01-quantize-*") if path.is_dir())
    written = (made / "model.onnx").stat().st_ino
    quantize(checkpoints["encoder"], tmp_path / "int8", *small, "guard.similarity_loss=0.1")
    assert (tmp_path / "int8/model.onnx").stat().st_ino == written  # linked, not made again


def test_a_graph_is_pruned_in_memory_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[str] = []
    monkeypatch.setattr("penjing.compress.families.graph.keep_freed_memory", lambda: kept.append("kept"))
    folder = graph_folder(tmp_path / "net", Residual(), torch.randn(4, 3, 16, 16))
    family("graph").need("pruner", "pruned").open(folder, (), (), Silent())
    assert kept == ["kept"]
