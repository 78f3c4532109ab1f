"""The artifact of a classifier: complete, verified, refused when changed, gated by parity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from penjing.compress.measure.evaluate import EvaluateSettings, evaluate_classifier
from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.compress.verify import print_verification, verify_artifact
from penjing.core.artifact import onnx as onnx_artifact
from penjing.core.artifact.onnx import ONNX_RUNTIME, ONNX_RUNTIME_DEFAULT, ONNX_RUNTIME_FLOAT, recorded
from penjing.core.artifact.onnx_classifier import logit_difference, open_classifier_artifact, recorded_images
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import publish_folder
from penjing.core.manifest import write_manifest
from penjing.core.progress import Silent
from tests.compress.quantize.folders import image_data, image_set, vision_folder

pytestmark = pytest.mark.xdist_group("classifier")  # what all share is made once


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return make(folder / "int8", vision_folder(folder / "fp32"))


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    """A copy, which a test may change."""
    return shutil.copytree(made, tmp_path / "int8")


def make(out: Path, source: Path, settings: ArtifactSettings | None = None) -> Path:
    with publish_folder(out) as partial:
        quantize_checkpoint(source, partial, settings or ArtifactSettings(), image_data())
    return out


def test_an_artifact_is_complete_and_says_how_far_it_is(tmp_path: Path) -> None:
    artifact, source = tmp_path / "int8", vision_folder(tmp_path / "fp32")
    with publish_folder(artifact) as partial:
        report = quantize_checkpoint(source, partial, ArtifactSettings(), image_data())
    opened = open_classifier_artifact(artifact)
    assert opened.quantization.session_options == {"session.x64quantprecision": "1"}
    assert opened.config.labels[3] == "3"
    assert report["agreement"] > 0.8
    assert [layer["name"] for layer in report["layers"]][:2] == ["stem", "blocks.0.layers.0"]
    assert all(0 < layer["weight"] < 0.02 and 0 < layer["output"] < 0.1 for layer in report["layers"])
    by_name = {difference.between[1]: difference for difference in opened.parity.differences}
    assert set(by_name) == {ONNX_RUNTIME, ONNX_RUNTIME_DEFAULT, ONNX_RUNTIME_FLOAT}
    assert by_name[ONNX_RUNTIME].largest < 0.05
    assert by_name[ONNX_RUNTIME_FLOAT].largest < 0.05
    pixels = recorded_images(opened.parity)
    assert np.array_equal(pixels, image_set().images[:32])
    stored = recorded(opened.parity, ONNX_RUNTIME)
    assert np.array_equal(opened.logits(opened.session(threads=1), pixels), stored)


def test_verify_runs_the_gate_again(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = verify_artifact(artifact)
    assert result["differences"] == [d.model_dump() for d in open_classifier_artifact(artifact).parity.differences]
    print_verification(result)
    said = capsys.readouterr().err
    assert "intact and within its bound" in said
    assert ONNX_RUNTIME_DEFAULT in said  # whole, also where 80 columns are too few
    (judged,) = [line for line in said.splitlines() if "≤" in line]
    assert f" {ONNX_RUNTIME} " in judged
    assert judged.rstrip().endswith(f"largest ≤ {result['bound']:g}")


def test_evaluation_runs_the_artifact(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penjing.compress.samples.data.load_fashion", lambda split, progress: image_set())
    quality = evaluate_classifier(artifact, artifact, EvaluateSettings(images=64), Silent())
    opened = open_classifier_artifact(artifact)
    logits = opened.logits(opened.session(), image_set().images)
    assert quality.value == float((logits.argmax(1) == image_set().labels).mean())


def test_tensorrt_s_artifact_says_that_tensorrt_was_not_run(tmp_path: Path) -> None:
    out = make(tmp_path / "trt", vision_folder(tmp_path / "fp32"), ArtifactSettings(target="tensorrt"))
    result = verify_artifact(out)
    assert "GPU" in result["unmeasured"]["tensorrt"]
    assert open_classifier_artifact(out).quantization.session_options == {}
    out = make(tmp_path / "fp8", tmp_path / "fp32", ArtifactSettings(target="tensorrt", activations="fp8"))
    assert verify_artifact(out)["differences"][0]["largest"] < 0.1


def test_an_artifact_beyond_its_bound_is_refused_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_artifact, "has_vnni", lambda: True)  # or the hint would be about sums that saturate
    source = vision_folder(tmp_path / "fp32")
    with pytest.raises(InputError, match=r"parity: onnxruntime differs from .* the bound is 1e-09; raise"):
        make(tmp_path / "int8", source, ArtifactSettings(parity_bound=1e-9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp32"]
    with pytest.raises(ConfigError, match="no activations in int8"):
        make(tmp_path / "int8", source, ArtifactSettings(activations="int8"))


@pytest.mark.parametrize("name", ["model.onnx", "quantization.json", "parity.json", "config.json"])
def test_changed_and_truncated_files_are_refused(artifact: Path, name: str) -> None:
    data = (artifact / name).read_bytes()
    (artifact / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"was changed or damaged|is not valid JSON"):
        verify_artifact(artifact)
    (artifact / name).unlink()
    with pytest.raises(InputError, match=r"does not exist|is missing|is no artifact|is not an artifact"):
        verify_artifact(artifact)


def test_a_changed_weight_with_a_new_manifest_fails_the_gate(artifact: Path) -> None:
    path = artifact / "model.onnx"
    model = onnx.load(str(path))
    for constant in model.graph.initializer:
        if constant.name == "stem.weight":
            weight = -numpy_helper.to_array(constant)
            constant.CopyFrom(numpy_helper.from_array(weight, constant.name))
    path.write_bytes(model.SerializeToString())
    write_manifest(artifact, "artifact", {})
    with pytest.raises(InputError, match="parity: onnxruntime differs from fake_quantized"):
        verify_artifact(artifact)


def test_an_onnx_file_that_is_not_ours_is_refused(artifact: Path) -> None:
    path = artifact / "model.onnx"
    model = onnx.load(str(path))
    model.graph.output[0].name = model.graph.node[-1].output[0] = "scores"
    path.write_bytes(model.SerializeToString())
    write_manifest(artifact, "artifact", {})
    with pytest.raises(InputError, match=r"outputs \['scores'\].*not ours"):
        verify_artifact(artifact)
    path.write_bytes(b"not ONNX at all")
    write_manifest(artifact, "artifact", {})
    with pytest.raises(InputError, match="cannot be loaded by ONNX Runtime"):
        verify_artifact(artifact)


def test_differences_are_relative_to_the_logits_spread() -> None:
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0)).numpy() * 50
    moved = logits.copy()
    moved[0, 0] += 5
    found = logit_difference(("a", "b"), logits, moved)
    assert found.largest == pytest.approx(5 / float((logits - logits.mean(0)).std()), rel=1e-5)
    assert json.loads(found.model_dump_json())["between"] == ["a", "b"]
    moved[0, 0] = np.nan
    with pytest.raises(InputError, match="b computes NaN"):
        logit_difference(("a", "b"), logits, moved)
