"""Texts that an encoder is calibrated with and judged on: the user's own among those that come along."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from penjing.compress.families.base import family
from penjing.compress.measure.evaluate import EvaluateSettings, evaluate_encoder
from penjing.compress.run import run_recipe
from penjing.compress.samples.data import DataSettings, text_samples
from penjing.compress.samples.retrieval import calibration_paragraphs, retrieval_set
from penjing.core.checkpoint.encoder import WEIGHTS, load_encoder
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.manifest import read_manifest
from penjing.core.progress import Silent
from penjing.core.text.text_tokenizer import TextTokenizer
from tests.core.models.encoders import write_sentence_transformer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    return import_model(str(write_sentence_transformer(folder / "source", layers=1)), folder / "tiny")


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


def test_an_encoder_is_judged_on_own_texts(encoder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(encoder, other)
    rng = np.random.default_rng(0)
    weights = load_file(encoder / WEIGHTS)
    noisy = {name: x + 0.1 * rng.standard_normal(x.shape).astype(x.dtype) for name, x in weights.items()}
    save_file(noisy, other / WEIGHTS)
    (other / "penjing.json").unlink()
    long = [f"the value of {name} is in the list. it is a function of the name" for name in ("a", "python", "it")]
    (tmp_path / "mine.txt").write_text("\n\n".join(["zebras run", *long]))
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "yaks stand"}))
    own = {"mine": tmp_path / "mine.txt", "short": tmp_path / "short.jsonl"}
    found = evaluate_encoder(other, encoder, EvaluateSettings(texts=8, own=own), Silent())

    plain = evaluate_encoder(other, encoder, EvaluateSettings(texts=8), Silent())
    texts = [text.split(". ")[0] + "." for text in long] + long + ["zebras run"]
    before, after = (_rows(folder, [*texts, "yaks stand"]) for folder in (encoder, other))
    cosines = (before * after).sum(1)
    assert found.samples == plain.samples + len(cosines)
    assert found.value == pytest.approx((16 * plain.value + cosines.sum()) / found.samples, abs=1e-5)
    assert found.parts[:2] == plain.parts
    chosen = [(rows[:3] @ rows[3:7].T).argmax(1) for rows in (before, after)]
    assert [(part.name, part.samples, part.value) for part in found.parts[2:]] == [
        ("mine", 7, pytest.approx(cosines[:7].mean(), abs=1e-5)),
        ("mine: nearest document unchanged", 3, (chosen[0] == chosen[1]).mean()),
        ("mine: nearest document right", 3, (chosen[1] == np.arange(3)).mean()),
        ("short", 1, pytest.approx(cosines[7], abs=1e-5)),
    ]
    with pytest.raises(InputError, match=r"evaluate\.own\.mine: "):
        evaluate_encoder(encoder, encoder, EvaluateSettings(own={"mine": tmp_path / "missing.txt"}), Silent())


def _rows(folder: Path, texts: list[str]) -> np.ndarray:
    model = load_encoder(folder)
    tokenize = TextTokenizer(folder, model.config)
    with torch.no_grad():
        return np.concatenate([model(*tokenize([text]).tensors()).numpy() for text in texts])


def test_the_time_of_an_evaluation_is_that_of_its_tokens_and_not_of_its_texts() -> None:
    words = sum(len(text.split()) for text in retrieval_set(256).texts())
    passes = family("encoder").held_out(EvaluateSettings(texts=256))
    assert 1 < passes / (2 * words) < 3  # the model beside it; a word is a token or two
