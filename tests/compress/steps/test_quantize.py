"""The step `quantize`: calibrated or trained, resumed to the same artifact, with or without a teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penjing.compress.graph.bits import within_bits
from penjing.compress.graph.equalize import equalize
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.task import QuantizedTask
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.quantizers.classifier import ClassifierQuantize, quantize
from penjing.compress.samples import data
from penjing.compress.samples.data import DataSettings
from penjing.core.artifact.onnx import recorded
from penjing.core.artifact.onnx_classifier import open_classifier_artifact
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.errors import ConfigError, InputError, PenjingError
from penjing.core.files import publish_folder
from penjing.core.progress import Silent
from penjing.core.work import Places
from penjing.train.data.images import ImageSet
from penjing.train.families import classifier as vision
from penjing.train.processes.stop import InterruptedRunError
from tests.compress.quantize.folders import image_data, image_set, vision_folder
from tests.compress.quantize.networks import network_of
from tests.conftest import write_tiny_checkpoint

TRAIN = {"steps": 12, "batch_size": 16, "evaluation_samples": 64, "device": "cpu", "checkpoint_every": 4}
RATE = {"learning_rate": {"peak": 0.02}, "optimizer": {"name": "sgd", "momentum": 0.9}}


def made_up(split: str, progress: object = None) -> ImageSet:
    return image_set({"train": 256, "test": 64}[split], seed={"train": 3, "test": 4}[split])


def few_images(patch: pytest.MonkeyPatch) -> None:
    """Images to learn, and others to calibrate on."""
    patch.setattr(vision, "load_fashion", made_up)
    patch.setattr(data, "load_fashion", lambda split, progress: image_set())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    few_images(monkeypatch)
    return vision_folder(tmp_path / "fp32")


def make(source: Path, out: Path, **values: Any) -> dict[str, Any]:
    """The record of the step, which is what the run's report says."""
    step = ClassifierQuantize.model_validate(values)
    work = out.with_name(f"{out.name}.scratch")
    work.mkdir(exist_ok=True)
    with publish_folder(out) as partial:
        return quantize(Places(source, partial, work), step, DataSettings(images=64, batch_images=32), source, Silent())


def test_calibration_alone_and_training_make_the_same_kind_of_artifact(source: Path, tmp_path: Path) -> None:
    untrained = make(source, tmp_path / "ptq")
    report = make(source, tmp_path / "qat", **TRAIN, **RATE, learn_weights=True)
    assert report["quantized"]["training_steps"] == 12
    assert report["training"]["evaluation"]["accuracy"] > 0.9
    trained = open_classifier_artifact(tmp_path / "qat")
    assert untrained["quantized"]["training_steps"] == 0
    assert untrained.keys() == report.keys() - {"training"}
    before, after = (
        {each["name"]: each["scale"] for each in record["quantized"]["activations"]} for record in (untrained, report)
    )
    assert before.keys() == after.keys()
    assert all(after[name] != before[name] for name in before)  # learned
    right = trained.logits(trained.session(1), made_up("test").images).argmax(1) == made_up("test").labels
    assert right.mean() == report["training"]["evaluation"]["accuracy"]  # what was trained is what ONNX Runtime runs


def test_a_killed_training_goes_on_to_the_same_artifact(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = TRAIN | RATE
    make(source, tmp_path / "once", **values)
    original = QuantizedTask.after_update

    def stopping(self: QuantizedTask, model: Any, world: Any) -> Any:
        def stop(step: int) -> None:
            if step == 9:  # the newest state is that of step 8
                raise InterruptedRunError("stopped; go on")

        return (*original(self, model, world), stop)

    with monkeypatch.context() as patched:
        patched.setattr(QuantizedTask, "after_update", stopping)
        with pytest.raises(InterruptedRunError):
            make(source, tmp_path / "twice", **values)
    assert not (tmp_path / "twice").exists()
    make(source, tmp_path / "twice", **values)
    make(source, tmp_path / "ptq")
    names = ("once", "twice", "ptq")
    once, twice, untrained = (
        recorded(open_classifier_artifact(tmp_path / name).parity, "onnxruntime") for name in names
    )
    # Resumed convolutions round their last bits differently, in train's own runs too.
    assert np.abs(once - twice).max() < 0.1 * once.std()
    assert np.abs(once - untrained).max() > 0.3 * once.std()  # so that the bound above means something


def test_a_teacher_guides(source: Path, tmp_path: Path) -> None:
    report = make(source, tmp_path / "out", **(TRAIN | {"steps": 4}), **RATE, teacher=str(source), temperature=2.0)
    assert "divergence" in report["training"]["losses"]["last"]
    assert report["training"]["teacher"] == str(source)


def test_bad_input_is_refused_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    cases: tuple[tuple[dict[str, Any], type[PenjingError], str], ...] = (
        ({"target": "onnxruntime-cpu", "activations": "fp8"}, ConfigError, "no activations in fp8"),
        (TRAIN | {"keep": ["conv1"]}, ConfigError, "'conv1' matches no layer"),
        (TRAIN | RATE | {"parity_bound": 1e-12, "steps": 2}, InputError, "parity: "),
    )
    for values, error, message in cases:
        with pytest.raises(error, match=message):
            make(source, tmp_path / "out", **values)
        assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="is no image classifier"):
        make(write_tiny_checkpoint(tmp_path / "decoder"), tmp_path / "out")


def test_damaged_weights_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.compress.quantize.folders import trained_resnet

    few_images(monkeypatch)
    model = trained_resnet()
    with torch.no_grad():
        model.blocks[2].layers[1].conv.weight[3] = float("inf")  # type: ignore[index, union-attr]
    source = vision_folder(tmp_path / "fp32", model)
    with pytest.raises(InputError, match=r"blocks\.2\.layers\.1\.weight holds NaN or infinity"):
        make(source, tmp_path / "out")


def test_outliers_are_dealt_with_on_the_way_to_the_artifact(source: Path, tmp_path: Path) -> None:
    settings = {"equalize": True, "correct_bias": True, "effective_bits": 16.0}
    make(source, tmp_path / "plain")
    made, data = prepared(network_of(load_classifier(source)[0])), image_data()
    equalize(made, data.inputs())
    kept = within_bits(made, GraphSettings.model_validate(settings), data.inputs).keep
    for training in ({}, TRAIN | RATE | {"steps": 2, "evaluation_samples": 0}):
        out = tmp_path / f"out-{len(training)}"
        report = make(source, out, **settings, **training)
        floating = [layer["name"] for layer in report["quantized"]["layers"] if layer["format"] == "float32"]
        assert floating
        assert list(kept) == floating
        assert 8 < report["quantized"]["effective_bits"] <= 16
        ours, other = (open_classifier_artifact(folder).parity for folder in (out, tmp_path / "plain"))
        assert np.abs(recorded(ours, "onnxruntime") - recorded(other, "onnxruntime")).max() > 0
