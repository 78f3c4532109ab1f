"""The step `dedup` by meaning: beside every pair compared one by one, and in runs with an encoder that counts words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.progress import Silent
from penjing.curate.learned import meaning
from penjing.curate.learned.meaning import leaders, packed
from penjing.curate.plan import make_plan
from penjing.curate.run import curate_recipe
from penjing.curate.steps import dedup
from penjing.curate.why import explain
from tests.curate.corpus import corpus_of, recipe, write_lines

WORDS = ("rain", "wind", "snow", "sun", "fog")


class Words:
    """In place of an encoder: how often each word of `WORDS` stands in a text."""

    def __init__(self, folder: Path, windows: int) -> None:
        assert windows == 4

    def __call__(self, text: str) -> np.ndarray:
        counts = np.array([text.split().count(word) for word in WORDS], np.float32)
        return counts / max(float(np.linalg.norm(counts)), 1e-12)


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an encoder that counts words."""
    monkeypatch.setattr(dedup, "DocumentEncoder", Words)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "penjing.json").write_text("{}")
    return tmp_path / "encoder"


def one_by_one(rows: np.ndarray, least: float) -> list[int]:
    """`leaders` by its definition."""
    first: list[int] = []
    vectors = np.ascontiguousarray(rows[:, 1:]).view(np.float16).astype(np.float32)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    for place in range(len(rows)):
        near = [
            (float(vectors[place] @ vectors[other]), -other)
            for other in range(place)
            if first[other] == other and rows[other, 0] == rows[place, 0]
        ]
        value, other = max(near, default=(-1.0, 0))
        first.append(-other if value >= least else place)
    return first


@given(
    st.integers(0, 40), st.integers(1, 3), st.integers(1, 9), st.floats(0.1, 0.99), st.integers(0, 2**31 - 1)
)  # fmt: skip
def test_every_document_stands_for_itself_or_has_one_that_is_near(
    documents: int, scopes: int, block: int, least: float, seed: int
) -> None:
    dice = np.random.default_rng(seed)
    vectors = dice.normal(size=(documents, 5)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    rows = [packed(int(dice.integers(scopes)), each, known=bool(dice.random() < 0.8)) for each in vectors]
    stored = np.stack(rows) if rows else np.empty((0, 3), np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meaning, "BLOCK", block)
        assert leaders(stored, least).tolist() == one_by_one(stored, least)


def test_no_chain_of_neighbours_joins_what_is_far_apart() -> None:
    angles = np.radians([0, 10, 20, 30, 5])
    rows = [packed(1, np.array([np.cos(a), np.sin(a)], np.float32), known=True) for a in angles]
    assert leaders(np.stack(rows), float(np.cos(np.radians(12)))).tolist() == [0, 0, 2, 2, 0]


def settings(encoder: Path, **values: Any) -> dict[str, Any]:
    return {"kind": "dedup", "method": "semantic", "encoder": str(encoder), **values}


def test_a_run_keeps_the_first_of_those_that_say_the_same(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", ["rain and rain", "snow in fog", "wind", "nothing of it"])
    write_lines(tmp_path / "in" / "b.jsonl", ["there was rain", "fog or snow", "sun", "nothing of that either"])
    corpora = []
    for name, task_mb in (("one", 64), ("two", 1e-6)):  # one task, and one for each file
        made = recipe(
            tmp_path, tmp_path / "in", steps=[settings(encoder)], output=str(tmp_path / name), task_mb=task_mb
        )
        curate_recipe(made, "test")
        corpora.append(corpus_of(made.output))
    whole = ["nothing of it", "nothing of that either", "rain and rain", "snow in fog", "sun", "wind"]
    assert sorted(corpora[0].values()) == whole
    assert corpora[1] == corpora[0]
    (said,) = explain("b.jsonl, line 1", tmp_path / "one")
    assert "dropped by step 0: dedup: same meaning of s/a.jsonl, line 1, which" in said


def test_texts_that_the_encoder_cannot_read_are_left_as_they_are(encoder: Path) -> None:
    step = dedup.DedupStep(kind="dedup", method="semantic", encoder=encoder)
    rows = step.keys()
    document = dedup.Document("a", "rain", "s", "d")
    assert rows(document).any()
    document.language = "ja"
    assert not rows(document)[1:].any()


def test_without_an_encoder_nothing_begins(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", ["rain"])
    made = recipe(tmp_path, tmp_path / "in", steps=[settings(tmp_path / "none")])
    with pytest.raises(InputError, match="none is no artifact of a text encoder; make one"):
        curate_recipe(made, "test")
    assert not made.output.exists()


def test_another_encoder_begins_anew(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", ["rain"])
    made = recipe(tmp_path, tmp_path / "in", steps=[settings(encoder)])
    before = make_plan(made, Silent()).stages[0].folder
    (encoder / "penjing.json").write_text("{ }")
    assert make_plan(made, Silent()).stages[0].folder != before


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"method": "minhash", "least": 0.7}, 'least is of method = "semantic", not of "minhash": leave it out'),
        ({"method": "exact", "rows": 3}, 'rows is of method = "minhash", not of "exact": leave it out'),
        ({"method": "semantic", "buckets": 3}, 'buckets is of method = "minhash", not of "semantic": leave it out'),
        ({"method": "semantic", "least": 1.0}, "least"),
        ({"method": "semantic", "windows": 0}, "windows"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(dedup.DedupStep, {"kind": "dedup", **values}, "test")
    assert says in str(raised.value)
