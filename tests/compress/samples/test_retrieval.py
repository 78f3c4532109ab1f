"""Texts that an encoder is calibrated with: the user's own among those that come along."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.compress.run import run_recipe
from penjing.compress.samples.data import DataSettings, text_samples
from penjing.compress.samples.retrieval import calibration_paragraphs
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from tests.core.models.encoders import write_sentence_transformer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return import_model(str(write_sentence_transformer(folder / "source")), folder / "tiny")


def test_own_texts_take_their_share(encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("zebras\nrun\n\n\nyaks stand\n\nzebras run\n")
    lines = [{"text": "one"}, {"text": "two\n\nthree"}, {"text": "  "}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = DataSettings(texts=16, own=0.25, calibrate=(tmp_path,))
    assert text_samples(encoder, settings, Silent()).texts == [
        "zebras run",
        "yaks stand",
        "one",
        "two",
        *calibration_paragraphs(12),
    ]
    few = text_samples(encoder, settings.model_copy(update={"own": 1.0}), Silent()).texts
    assert few == ["zebras run", "yaks stand", "one", "two", "three", *calibration_paragraphs(11)]
    assert text_samples(encoder, DataSettings(texts=16), Silent()).texts == calibration_paragraphs(16)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, "line 1: text encoders have no conversations"),
        ({"text": " "}, "the files hold no text"),
        ({"query": "a"}, 'line 1: an object with "text"'),
    ],
)
def test_what_an_encoder_cannot_read_is_named(encoder: Path, tmp_path: Path, line: object, says: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(InputError, match=says):
        text_samples(encoder, DataSettings(texts=16, calibrate=(path,)), Silent())


def test_an_encoder_is_made_again_when_its_text_changes(encoder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("zebras and yaks\n\n" * 3)
    values = {
        "model": str(encoder),
        "output": str(tmp_path / "out"),
        "data": {"texts": 16, "calibrate": [str(own)]},
        "evaluate": {"texts": 16},
        "measure": {"rounds": 0},
        "guard": {"similarity_loss": 0.1},
        "steps": [{"kind": "quantize", "parity_bound": 0.05}],
    }
    first = read_manifest(run_recipe(values))
    own.write_text("qqqqqq zzzzz 99999 ======\n\n" * 3)
    with pytest.raises(InputError, match="made from another recipe, input or version"):
        run_recipe(values)
    assert read_manifest(run_recipe(values, force=True)).sha256["model.onnx"] != first.sha256["model.onnx"]
