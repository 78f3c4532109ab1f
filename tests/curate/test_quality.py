"""The step `quality` on texts of two kinds, with an encoder that counts words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.curate.documents.document import Document
from penjing.curate.learned.encoder import DocumentEncoder
from penjing.curate.run import curate_recipe
from penjing.curate.steps import quality
from penjing.curate.steps.quality import Quality, QualityStep
from penjing.curate.why import explain
from tests.curate.corpus import corpus_of, recipe, write_lines

pytest.importorskip("fasttext")
WORDS = [f"{a}{b}" for a in ("val", "func", "cla", "obj", "py") for b in ("ue", "ion", "ss", "ect")]


class Words:
    """In place of an encoder: how often each word of `WORDS` stands in a text."""

    def __init__(self, folder: Path, windows: int) -> None:
        assert windows == 1

    def __call__(self, text: str) -> np.ndarray:
        words = text.split()
        return np.array([words.count(word) / max(1, len(words)) for word in WORDS], np.float32)


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an encoder that counts words."""
    monkeypatch.setattr(quality, "DocumentEncoder", Words)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "penjing.json").write_text("{}")
    return tmp_path / "encoder"


def text(seed: int, good: bool) -> str:
    """Words of one half of the encoder's vocabulary, or mostly of the other."""
    dice = np.random.default_rng(seed)
    return f"{' '.join(dice.choice(WORDS[10:] if good else WORDS[:10], 30))} {seed}."


def labels(path: Path, number: int = 40) -> Path:
    rows = [{"text": text(10_000 + n, n % 2 == 0), "label": (n + 1) % 2, "language": "en"} for n in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def step(encoder: Path, path: Path, **values: Any) -> QualityStep:
    settings = {"kind": "quality", "encoder": str(encoder), "labels": str(path), **values}
    return parse_config(QualityStep, settings, "test")


def documents(number: int) -> list[Document]:
    return [Document(f"d{n}", text(n, n % 2 == 0), "s", "d") for n in range(number)]


def test_a_run_keeps_what_is_like_good_examples(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "in").mkdir()
    for part in range(3):
        write_lines(tmp_path / "in" / f"{part}.jsonl", [text(100 * part + n, n % 2 == 0) for n in range(20)])
    settings = {"kind": "quality", "encoder": str(encoder), "labels": str(labels(tmp_path / "labels.jsonl"))}
    steps = [{"kind": "clean"}, {"kind": "dedup"}, settings, {"kind": "clean"}]
    made = recipe(tmp_path, tmp_path / "in", steps=steps)
    report = curate_recipe(made, "test")
    whole = corpus_of(made.output)
    good = sum(any(word in kept for word in WORDS[12:]) for kept in whole.values())
    assert good / len(whole) > 0.9
    assert 20 <= len(whole) <= 40
    (learned,) = report.learned
    assert (learned.step, learned.examples, learned.positive, learned.sample) == ("2: quality", 40, 20, 60)
    assert learned.auc > 0.9
    assert learned.decided == {"encoder": 60}
    assert "probability of good" in (made.output / "report.html").read_text()
    assert "area under the ROC curve" in (made.output / "report.html").read_text()
    assert ", quality 0." in "\n".join(explain(next(iter(whole)), made.output))
    parts = recipe(tmp_path, tmp_path / "in", steps=steps, output=str(tmp_path / "parts"), task_mb=1e-6)
    curate_recipe(parts, "test")
    assert corpus_of(parts.output) == whole


def test_the_student_takes_the_clear_cases(tmp_path: Path, encoder: Path) -> None:
    made = step(encoder, labels(tmp_path / "labels.jsonl"), sample=400, student_errors=0.1)
    learned = made.learn(tmp_path, documents(400), tmp_path, Silent())
    assert learned.student is not None
    assert learned.student.decided > 0.5
    assert learned.student.agreement > 0.85
    judge = made.filter(tmp_path)
    each = documents(430)[400:]
    kept = [judge.apply(document) is None for document in each]
    assert np.mean(np.array(kept) == (np.arange(30) % 2 == 0)) > 0.85
    assert judge.decided["student"] > 10
    rule = learned.thresholds[""]
    assert all((document.quality or 0) >= rule for document, good in zip(each, kept, strict=True) if good)
    assert all((document.quality or 0) < rule for document, good in zip(each, kept, strict=True) if not good)


def test_thresholds_by_share_and_by_precision(tmp_path: Path, encoder: Path) -> None:
    path = labels(tmp_path / "labels.jsonl")
    made = step(encoder, path, keep=0.25)
    made.learn(tmp_path, documents(100), tmp_path, Silent())
    judge = made.filter(tmp_path)
    assert sum(judge.apply(each) is None for each in documents(100)) == pytest.approx(25, abs=1)
    precise = step(encoder, path, precision=0.9)
    assert "precision" in precise.learn(tmp_path, documents(4), tmp_path, Silent()).chosen
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "label": place % 4 < 2}) + "\n" for place, row in enumerate(rows)))
    with pytest.raises(InputError, match=r"no threshold has a precision of 0.99"):
        step(encoder, path, precision=0.99).learn(tmp_path, documents(4), tmp_path, Silent())


def test_other_languages_are_not_judged(tmp_path: Path, encoder: Path) -> None:
    made = step(encoder, labels(tmp_path / "labels.jsonl"))
    made.learn(tmp_path, documents(4), tmp_path, Silent())
    judge: Quality = made.filter(tmp_path)
    other = Document("d", text(1, False), "s", "d", language="de")
    assert judge.apply(other) is None
    assert other.quality is None
    assert judge.decided == {"nothing: no labels in de": 1}
    same = Document("d", text(1, False), "s", "d", language="en")
    assert judge.apply(same) == "low quality"
    judged = Document("d", "", "s", "d")
    judge.apply(judged)  # an empty text has a score too
    assert judged.quality is not None


def test_languages_with_few_labels_are_not_judged(tmp_path: Path, encoder: Path) -> None:
    path = labels(tmp_path / "labels.jsonl", 24)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    codes = ("en", "de", "fr", "es", "it", "pt")  # four labels each
    rows = [{**row, "language": codes[place % 6]} for place, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = step(encoder, path)
    with pytest.raises(InputError, match="no language has 5 labels, so that no document would be judged"):
        made.learn(tmp_path, [Document("d", text(1, False), "s", "d", language="fi")], tmp_path, Silent())
    untold = Document("d", text(1, False), "s", "d")
    made.learn(tmp_path, [untold], tmp_path, Silent())
    judge: Quality = made.filter(tmp_path)
    judge.apply(untold)
    other = Document("d", text(1, False), "s", "d", language="fi")
    assert judge.apply(other) is None
    assert untold.quality is not None
    assert other.quality is None


def test_what_is_too_little_is_refused(tmp_path: Path, encoder: Path) -> None:
    few = labels(tmp_path / "few.jsonl", 19)
    with pytest.raises(InputError, match="at least 20 are needed"):
        step(encoder, few).learn(tmp_path, [], tmp_path, Silent())
    with pytest.raises(InputError, match="of 40 labels 0 are 2 and more"):
        step(encoder, labels(tmp_path / "one.jsonl"), good=2).learn(tmp_path, [], tmp_path, Silent())
    with pytest.raises(InputError, match="does not exist"):
        step(encoder, tmp_path / "none").files()
    with pytest.raises(InputError, match=r"penjing compress recipes/minilm-int8.toml"):
        step(tmp_path / "nowhere", few).files()
    with pytest.raises(ConfigError, match="give one"):
        parse_config(QualityStep, {"kind": "quality"}, "test")
    with pytest.raises(ConfigError, match="both choose"):
        step(encoder, few, keep=0.5, precision=0.5)
    asked = {"kind": "quality", "label_with": "http://localhost:1/v1", "num_labels": 3000}
    with pytest.raises(ConfigError, match="num_labels=3000 are to be judged of sample=2000 documents"):
        parse_config(QualityStep, asked, "test")
    assert parse_config(QualityStep, {**asked, "sample": 3000}, "test").num_labels == 3000


@pytest.mark.full
def test_an_embedding_does_not_depend_on_neighbours(tmp_path: Path) -> None:
    from penjing.compress.run import run_recipe
    from penjing.core.imports.importer import import_model
    from tests.core.models.encoders import small_recipe, write_sentence_transformer

    checkpoint = import_model(str(write_sentence_transformer(tmp_path / "source")), tmp_path / "tiny")
    embed = DocumentEncoder(run_recipe(small_recipe(checkpoint, tmp_path / "small-int8")), 2)
    assert np.array_equal(embed.all(["a value", "the list of python " * 100])[1], embed("the list of python " * 100))
