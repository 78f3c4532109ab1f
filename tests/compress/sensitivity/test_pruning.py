"""Sensitivity: cells equal what removal gives, a killed run keeps its cells, bad input is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from penjing.compress.families.base import family_at
from penjing.compress.prune.graph import dependency_graph
from penjing.compress.prune.importance import magnitude
from penjing.compress.prune.ranking import select
from penjing.compress.prune.resnet_subject import ResNetSubject
from penjing.compress.prune.surgery import remove
from penjing.compress.samples import data
from penjing.compress.sensitivity import pruning as module
from penjing.compress.sensitivity.kinds import TO_BITS, TO_PRUNING
from penjing.compress.sensitivity.pruning import PruningSettings, masked
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core import cli
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import ConfigError, InputError
from penjing.core.images.normalise import normalise
from penjing.core.progress import Silent
from penjing.core.text.corpus import calibration_text, first_windows
from penjing.core.text.tokenizer import Tokenizer
from tests.compress.classifiers import made_up_images, write_classifier

SMALL = PruningSettings(ratios=(0.25, 0.5), images=96, windows=2, window=32)


@pytest.fixture
def classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(data, "load_fashion", made_up_images)
    return write_classifier(tmp_path / "classifier")


def test_cells_of_a_classifier_equal_removal(classifier: Path) -> None:
    result = TO_PRUNING.measure(classifier, SMALL)
    written = classifier.with_name("classifier-sensitivity")
    assert json.loads((written / "sensitivity.json").read_text()) == result
    page = (written / "sensitivity.html").read_text()
    assert "http" not in page
    assert page.count("<svg") >= 1
    assert not list(classifier.parent.glob(".*"))  # nothing is left over
    subject = ResNetSubject(classifier)
    groups = dependency_graph(subject.model, subject.example).groups
    assert [row["name"] for row in result["rows"]] == [group.name for group in groups]
    images = made_up_images("train").first(96)
    _, config = load_classifier(classifier)
    inputs = torch.from_numpy(normalise(images.images, np.array(config.mean, "f4"), np.array(config.std, "f4")))
    for place in (0, 2, len(groups) - 1):
        group, cell = groups[place], result["rows"][place]["cells"][1]
        model, _ = load_classifier(classifier)
        choice = select([group], magnitude(subject.weights, [group]), 0.5, round_to=1)
        remove(model, choice)
        with torch.no_grad():
            right = (model(inputs).argmax(1).numpy() == images.labels).mean()
        assert cell["value"] == pytest.approx(right)
        assert cell["removed"] == len(group) // 2
    assert len({cell["value"] for row in result["rows"] for cell in row["cells"]}) > 3


def test_cells_of_a_decoder_equal_a_pruned_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> None:
    result = TO_PRUNING.measure(tiny_checkpoint, SMALL, out=tmp_path / "out")
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) == 5  # hidden width; key-value heads and MLP channels of two layers
    pruned = tmp_path / "pruned"
    pruned.mkdir()
    step = Prune(ratio=0.5, parts=("hidden",), round_to=1)
    pruner = family_at(tiny_checkpoint).need("pruner", "pruned")
    record = prune_checkpoint(tiny_checkpoint, pruned, step, pruner, None, Silent())
    (name,) = (row["name"] for row in record["groups"])
    windows = first_windows(Tokenizer.from_folder(tiny_checkpoint), calibration_text(), 64, 32)
    with torch.no_grad():
        wanted = load_model(pruned).model(windows[:, :-1], targets=windows[:, 1:]) / 62
    assert rows[name]["cells"][1]["loss"] == pytest.approx(float(wanted), rel=1e-4)
    with torch.no_grad():
        wanted = load_model(tiny_checkpoint).model(windows[:, :-1], targets=windows[:, 1:]) / 62
    assert result["baseline"]["loss"] == pytest.approx(float(wanted), rel=1e-5)


def test_a_killed_run_goes_on_with_the_cells_it_has(classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    judge, calls = module.judge_images, 0

    def dies(*arguments: object, **named: object) -> dict[str, object]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Killed
        return judge(*arguments, **named)  # type: ignore[arg-type]

    settings = PruningSettings(ratios=(0.5,), images=48)
    whole = TO_PRUNING.measure(classifier, settings, out=classifier.with_name("whole"))
    monkeypatch.setattr(module, "judge_images", dies)
    out = classifier.with_name("out")
    with pytest.raises(Killed):
        TO_PRUNING.measure(classifier, settings, out=out)
    assert not out.exists()
    again = TO_PRUNING.measure(classifier, settings, out=out)
    cells = sum(len(row["cells"]) for row in again["rows"])
    assert calls == 4 + cells - 2  # the baseline and two cells were kept
    assert again["rows"] == whole["rows"]
    before = calls
    assert TO_PRUNING.measure(classifier, settings, out=out) == again
    assert calls == before


def test_masking_is_undone_whatever_happens(classifier: Path) -> None:
    model, _ = load_classifier(classifier)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    subject = ResNetSubject(classifier)
    group = dependency_graph(subject.model, subject.example).groups[0]
    try:
        with masked(model, [(group, [0, 2])]):
            assert not torch.equal(model.stem.conv.weight, before["stem.conv.weight"])
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ("0.1,x", "numbers with commas"),
        ("0,0.5", "above 0 and below 1"),
        ("1.5", "above 0 and below 1"),
        ("0.5,0.1", "growing"),
        ("-0.1", "above 0 and below 1"),
    ],
)
def test_bad_ratios(ratios: str, message: str, tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TO_PRUNING.settings_of(tiny_checkpoint, {"ratios": ratios})


def test_bad_folders(classifier: Path, tmp_path: Path, tiny_checkpoint: Path) -> None:
    with pytest.raises(InputError, match="missing does not exist"):
        TO_PRUNING.measure(tmp_path / "missing")
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder/config.json").write_text('{"model_type": "bert"}')
    for study in (TO_PRUNING, TO_BITS):
        with pytest.raises(InputError, match=f"a text encoder, whose sensitivity to {study.kind} cannot be measured"):
            study.measure(tmp_path / "encoder")
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match=r"holds no sensitivity\.json"):
        TO_PRUNING.measure(classifier, SMALL, out=out)
    TO_PRUNING.measure(classifier, SMALL, out=tmp_path / "done")
    with pytest.raises(InputError, match="another checkpoint, settings or files"):
        TO_PRUNING.measure(classifier, PruningSettings(images=50), out=tmp_path / "done")
    with pytest.raises(ConfigError, match="window=1024 is longer"):
        TO_PRUNING.measure(tiny_checkpoint, PruningSettings(window=1024, data="held-out"), out=tmp_path / "new")
    broken = write_classifier(tmp_path / "broken", scale=float("nan"))
    with pytest.raises(InputError, match=r"fc\.weight holds NaN"):
        TO_PRUNING.measure(broken, SMALL)


def test_the_command(classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, rows = tmp_path / "out", tmp_path / "rows.json"
    command = ["compress", "sensitivity", str(classifier), "--data", "held-out", "--ratios", "0.5", "--images", "64"]
    assert cli._run([*command, "--out", str(out), "--json", str(rows)]) == 0
    shown = capsys.readouterr().err
    assert "cells, left" in shown
    result = json.loads(rows.read_text())
    assert all(row["name"] in shown for row in result["rows"])
    assert result["baseline"]["samples"] == 64
    assert result["settings"]["data"] == "held-out"
