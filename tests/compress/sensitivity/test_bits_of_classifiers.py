"""Bits a layer of a classifier: cells equal rounding by hand, a damaged layer is the worst, a killed run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.compress.report.study_page import most_sensitive
from penjing.compress.samples import data
from penjing.compress.sensitivity import bits as module
from penjing.compress.sensitivity.bits import ClassifierBits, weighted_layers
from penjing.compress.sensitivity.kinds import TO_BITS
from penjing.core import cli
from penjing.core.checkpoint.classifier import load_classifier, save_classifier
from penjing.core.errors import ConfigError, InputError
from penjing.core.files import publish_folder
from penjing.core.images.normalise import normalise
from penjing.core.models.resnet import ResNet
from tests.compress.classifiers import MEAN, STD, made_up_images, write_classifier

SMALL = ClassifierBits(widths=(8, 4), images=96)
DAMAGED = "blocks.1.layers.1"


@pytest.fixture(autouse=True)
def images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load_fashion", made_up_images)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "classifier")


@torch.no_grad()
def answers(model: ResNet, split: str = "train") -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of 96 images in float64, and their labels."""
    images = made_up_images(split).first(96)
    inputs = torch.from_numpy(normalise(images.images, np.array([MEAN], "f4"), np.array([STD], "f4")))
    return model(inputs).double().log_softmax(1), torch.from_numpy(images.labels.astype(np.int64))


def test_cells_equal_rounding_by_hand(classifier: Path) -> None:
    result = TO_BITS.measure(classifier, SMALL)
    model, _ = load_classifier(classifier)
    floating, labels = answers(model)
    right = (floating.argmax(1) == labels).double().mean()
    assert result["baseline"]["value"] == pytest.approx(float(right))
    assert result["baseline"]["samples"] == 96
    assert [row["name"] for row in result["rows"]] == list(weighted_layers(model))
    assert len(result["rows"]) == 1 + 6 + 2 + 1  # stem, three blocks, two shortcuts, fc
    for place in (0, 4, -1):
        row = result["rows"][place]
        changed, _ = load_classifier(classifier)
        layer = weighted_layers(changed)[row["name"]]
        weight = layer.weight.detach()
        for channel in weight:
            scale = channel.abs().max() / 7
            channel.copy_((channel / scale).round() * scale)
        found, _ = answers(changed)
        divergence = (floating.exp() * (floating - found)).sum(1).mean()
        cell = row["cells"][1]
        assert cell["at"] == 4
        assert row["size"] == weight.numel()
        assert cell["divergence"] == pytest.approx(float(divergence), rel=1e-3)
        assert cell["loss"] == pytest.approx(float(-found[range(96), labels].mean()), rel=1e-4)
        assert cell["value"] == pytest.approx(float((found.argmax(1) == labels).double().mean()))
        assert row["cells"][0]["divergence"] < 0.1 * cell["divergence"]  # (16 times finer) squared


def test_a_layer_with_outliers_is_the_worst(classifier: Path, tmp_path: Path) -> None:
    """An input channel that is always zero gets weights that set every scale: in floating point they do nothing."""
    model, config = load_classifier(classifier)
    norm = model.get_submodule("blocks.1.layers.0.norm")
    assert isinstance(norm, torch.nn.BatchNorm2d)
    before, _ = answers(model)
    with torch.no_grad():
        norm.weight[0], norm.bias[0] = 0, 0
        dead, _ = answers(model)
        weighted_layers(model)[DAMAGED].weight[:, 0] = 4.0
    after, _ = answers(model)
    assert torch.equal(dead, after)
    assert not torch.equal(before, dead)
    with publish_folder(tmp_path / "outliers") as partial:
        save_classifier(partial, config, model, {"command": "tests"})
    assert most_sensitive(TO_BITS.measure(classifier, SMALL))[0] != DAMAGED
    result = TO_BITS.measure(tmp_path / "outliers", SMALL)
    assert most_sensitive(result)[0] == DAMAGED
    eight = {row["name"]: row["cells"][0]["divergence"] for row in result["rows"]}
    assert eight.pop(DAMAGED) > 5 * max(eight.values())


def test_a_killed_run_goes_on_to_the_same_table(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = TO_BITS.measure(classifier, SMALL, out=classifier.with_name("whole"))
    judge, calls = module.judge_answers, 0

    def dies(*arguments: object) -> dict[str, float]:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return judge(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "judge_answers", dies)
    out = classifier.with_name("out")
    with pytest.raises(KeyboardInterrupt):
        TO_BITS.measure(classifier, SMALL, out=out)
    assert not out.exists()
    again = TO_BITS.measure(classifier, SMALL, out=out)
    assert calls == 1 + 2 * len(again["rows"]) + 1  # the baseline, each cell once, and the one that was lost
    assert (again["rows"], again["baseline"]) == (whole["rows"], whole["baseline"])
    assert TO_BITS.measure(classifier, SMALL, out=out) == again  # kept
    assert calls == 1 + 2 * len(again["rows"]) + 1
    assert sorted(path.name for path in out.iterdir()) == ["sensitivity.html", "sensitivity.json"]
    assert not list(classifier.parent.glob(".*"))


def test_rounding_is_undone_whatever_happens(classifier: Path) -> None:
    model, _ = load_classifier(classifier)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        with module.rounded_weights(model.stem.conv, 3):  # type: ignore[arg-type]
            assert not torch.equal(model.stem.conv.weight, before["stem.conv.weight"])
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_command_shows_and_writes_the_table(
    classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.json"
    command = ["compress", "sensitivity", str(classifier), "--bits", "--data", "held-out", "--images", "64"]
    assert cli._run([*command, "--widths", "8,2", "--json", str(rows)]) == 0
    shown = capsys.readouterr().err
    assert "cells, left" in shown
    result = json.loads(rows.read_text())
    assert all(row["name"] in shown for row in result["rows"])
    assert f"most sensitive at 2 bits: {most_sensitive(result)[0]}, " in shown
    assert result["settings"] == {"widths": [8, 2], "data": "held-out", "images": 64}
    test = made_up_images("test").first(64)
    model, _ = load_classifier(classifier)
    found, _ = answers(model, "test")
    assert result["baseline"]["value"] == pytest.approx(float((found[:64].argmax(1).numpy() == test.labels).mean()))
    page = (tmp_path / "classifier-bits/sensitivity.html").read_text()
    assert page.count("<svg") == 2
    assert "http" not in page
    assert f"<code>{DAMAGED}</code>" in page


def test_bad_input_is_one_error_and_leaves_nothing(classifier: Path, tmp_path: Path) -> None:
    broken = write_classifier(tmp_path / "broken", scale=float("inf"))
    images = data.ImageData(made_up_images("train").first(64), (MEAN,), (STD,), 32)
    with publish_folder(tmp_path / "int8") as partial:
        quantize_checkpoint(classifier, partial, ArtifactSettings(), images)
    large = write_classifier(tmp_path / "large", image_size=(16, 16))
    for folder, message in (
        (broken, r"fc\.weight holds NaN or infinity"),
        (tmp_path / "int8", "is quantized already; compress the checkpoint"),
        (large, r"takes images of \(1, 16, 16\)"),
    ):
        with pytest.raises(InputError, match=message) as found:
            TO_BITS.measure(folder, SMALL)
        assert "\n" not in str(found.value)
        assert not folder.with_name(f"{folder.name}-bits").exists()
    weights = classifier / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        TO_BITS.measure(classifier, SMALL)
    with pytest.raises(ConfigError, match="from 16 to 2, falling"):
        TO_BITS.settings_of(large, {"widths": "4,8"})
