"""The step `noise`: corruptions, what is usual, two heads, and the step itself with an encoder that counts words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from penjing.core.config import parse_config
from penjing.core.errors import InputError
from penjing.core.progress import Silent
from penjing.curate.documents.document import Document
from penjing.curate.learned.conformal import enough_for, upper_threshold
from penjing.curate.learned.corruptions import CORRUPTIONS
from penjing.curate.learned.surface import Usual, load_usual, usual_of
from penjing.curate.learned.twoheads import Looks, learn_two_heads, load_two_heads
from penjing.curate.run import curate_recipe
from penjing.curate.steps import noise
from penjing.curate.steps.noise import NoiseStep
from tests.curate.corpus import WORDS, corpus_of, recipe, write_lines

GRAMMAR = {word: WORDS[(place * 7 + 1) % len(WORDS)] for place, word in enumerate(WORDS)}


def sentences(seed: int, words: int = 60) -> str:
    """Words of which each mostly says what the next one is."""
    dice = np.random.default_rng(seed)
    said = [str(dice.choice(WORDS))]
    for _ in range(words):
        said.append(GRAMMAR[said[-1]] if dice.random() < 0.8 else str(dice.choice(WORDS)))
    return "\n".join(" ".join(said[begin : begin + 12]).capitalize() + f", {seed}." for begin in range(0, words, 12))


class Letters:
    """In place of an encoder: the share of each letter, and a token for each two signs of a word that is not known."""

    def __init__(self, folder: Path, windows: int) -> None:
        self._windows = windows

    def __call__(self, text: str) -> np.ndarray:
        return np.array([text.lower().count(chr(97 + place)) / max(1, len(text)) for place in range(26)], np.float32)

    def pieces(self, text: str) -> list[tuple[str, np.ndarray]]:
        return [(text[:1000], self(text[:1000]))]

    def num_tokens(self, text: str) -> int:
        return sum(1 if word.strip(".,").lower() in GRAMMAR else 1 + len(word) // 2 for word in text.split())


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(noise, "DocumentEncoder", Letters)
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "penjing.json").write_text("{}")
    return tmp_path / "encoder"


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("text", [sentences(1), "one", "", "äöü ß 漢字 \n\n\t ```x = 1``` " * 9])
def test_every_corruption_takes_any_text_and_is_the_same_each_time(kind: str, text: str) -> None:
    made = [CORRUPTIONS[kind](text, [sentences(2), "", text], np.random.default_rng(3)) for _ in range(2)]
    assert made[0] == made[1]
    made[0].encode()
    if len(text) > 100:
        assert made[0] != text


def test_shuffled_words_are_the_same_words_on_the_same_lines() -> None:
    text = sentences(5)
    made = CORRUPTIONS["shuffled words"](text, [], np.random.default_rng(0))
    assert sorted(made.split()) == sorted(text.split())
    assert made.count("\n") == text.count("\n")


def test_what_is_usual_counts_what_other_texts_have(tmp_path: Path) -> None:
    texts = ["alpha beta gamma", "alpha beta delta", "omega"]
    usual: Usual = usual_of([(text, 3) for text in texts], texts)
    usual.save(tmp_path / "usual.npz")
    usual = load_usual(tmp_path / "usual.npz")
    assert usual.features(texts[0], 3)[-2:].tolist() == [1, 1]
    words, pairs = usual.features(texts[0], 3, own=texts[0])[-2:]
    assert (words, pairs) == (pytest.approx(2 / 3), pytest.approx(1 / 2 / (2 / 3)))
    assert usual.features("gamma beta alpha", 3)[-2:].tolist() == [1, 0]
    assert usual.features("", 0)[-2:].tolist() == [0, 0]
    assert np.isfinite(usual.features("\x00" * 5000, 9)).all()


def test_two_heads_are_judged_on_documents_that_they_did_not_see(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    looks = [Looks(dice.normal(size=40).astype(np.float32), dice.normal(size=12)) for _ in range(300)]
    nothing = dice.random(300) < 0.5
    heads, held = learn_two_heads(looks, nothing, np.arange(300) // 3)
    assert abs(np.corrcoef(held, nothing)[0, 1]) < 0.3
    clear = np.array([look.surface[0] > 0 for look in looks])
    heads, held = learn_two_heads(looks, clear, np.arange(300) // 3)
    assert ((held > 0.5) == clear).mean() > 0.85
    heads.save(tmp_path / "heads.json")
    assert np.array_equal(load_two_heads(tmp_path / "heads.json")(looks), heads(looks))


def test_a_run_drops_noise(tmp_path: Path, encoder: Path) -> None:
    (tmp_path / "in").mkdir()
    dice, clean = np.random.default_rng(0), [sentences(seed) for seed in range(240)]
    bad = [
        CORRUPTIONS[kind](sentences(900 + n), clean, dice) for n, kind in enumerate(["gibberish", "machine dump"] * 4)
    ]
    write_lines(tmp_path / "in" / "a.jsonl", clean[:200] + bad)
    write_lines(tmp_path / "clean.jsonl", clean)
    settings = {"kind": "noise", "encoder": str(encoder), "clean": [str(tmp_path / "clean.jsonl")], "sample": 220}
    made = recipe(tmp_path, tmp_path / "in", steps=[settings])
    report = curate_recipe(made, "test")
    lost = {f"s/a.jsonl, line {n}" for n in range(1, 209)} - set(corpus_of(made.output))
    assert len(lost & {f"s/a.jsonl, line {n}" for n in range(201, 209)}) >= 7
    assert len(lost) <= 7 + 8
    (learned,) = report.learned
    assert learned.auc > 0.8
    assert set(learned.kinds) == set(CORRUPTIONS)
    assert (learned.speaks_of, learned.examples, learned.positive) == ("noise", 584, 438)
    assert [(rule.rule, rule.documents) for rule in report.rules] == [("looks like noise", len(lost))]
    assert "kind of noise" in (made.output / "report.html").read_text()


def test_a_threshold_keeps_its_promise_whatever_the_scores_are() -> None:
    dice = np.random.default_rng(0)
    above = []
    for _ in range(4000):
        scores = dice.standard_cauchy(120)
        threshold, promised = upper_threshold(scores[:-1], 0.05)
        assert promised == pytest.approx(0.05)
        above.append(scores[-1] > threshold)
    assert np.mean(above) == pytest.approx(0.05, abs=0.01)
    assert upper_threshold(np.arange(9.0), 0.01) == (8.0, pytest.approx(0.1))  # nine scores can promise no less
    assert enough_for(0.01) == 99
    assert upper_threshold(np.arange(99.0), 0.01) == (98.0, pytest.approx(0.01))


def test_nothing_is_learned_from_what_sets_the_threshold(tmp_path: Path, encoder: Path) -> None:
    made = parse_config(NoiseStep, {"kind": "noise", "encoder": str(encoder), "flagged": 0.05}, "test")
    documents = [Document(f"d{n}", sentences(n), "s", "d", language="en") for n in range(240)]
    facts = made.learn(tmp_path, documents, tmp_path, Silent())
    judge = made.filter(tmp_path)
    dropped = [judge.apply(each) is not None for each in documents]
    assert sum(dropped[::3]) == 80 - math.ceil(81 * 0.95)  # one in three sets it, by what the filter says of it
    assert facts.sample == 160
    assert facts.chosen == f"{1 - math.ceil(81 * 0.95) / 81:.1%} of clean documents are expected above"


def test_each_domain_has_its_threshold(tmp_path: Path, encoder: Path) -> None:
    made = parse_config(NoiseStep, {"kind": "noise", "encoder": str(encoder), "flagged": 0.05}, "test")
    documents = [Document(f"d{n}", sentences(n), "s", "few" if n < 10 else "many", language="en") for n in range(210)]
    learned = made.learn(tmp_path, documents, tmp_path, Silent())
    assert set(learned.thresholds) == {"", "many"}
    assert "few have fewer than the 19 documents" in learned.chosen
    judge = made.filter(tmp_path)
    assert judge.apply(Document("d", CORRUPTIONS["gibberish"](sentences(1), [], np.random.default_rng(0)), "s", "new"))
    other = Document("d", "gibberish", "s", "new", language="de")  # a language that nothing was learned of
    assert judge.apply(other) is None
    assert other.noise is None
    assert judge.decided == {"heads": 1, "nothing: too few documents in de": 1}
    empty = Document("d", "", "s", "new")
    judge.apply(empty)
    assert empty.noise is not None


def test_languages_with_few_documents_are_not_judged(tmp_path: Path, encoder: Path) -> None:
    made = parse_config(NoiseStep, {"kind": "noise", "encoder": str(encoder)}, "test")
    documents = [Document(f"d{n}", sentences(n), "s", "d", language=f"x{n % 12}") for n in range(216)]
    with pytest.raises(InputError, match="of no language there are 20 documents to learn from"):
        made.learn(tmp_path, documents, tmp_path, Silent())
    untold = [Document(f"d{n}", sentences(n), "s", "d") for n in range(3)]
    made.learn(tmp_path, documents + untold, tmp_path, Silent())
    judge = made.filter(tmp_path)
    assert judge.apply(documents[0]) is None
    assert documents[0].noise is None
    judge.apply(untold[0])
    assert untold[0].noise is not None


def test_too_few_clean_documents_are_refused(tmp_path: Path, encoder: Path) -> None:
    made = parse_config(NoiseStep, {"kind": "noise", "encoder": str(encoder)}, "test")
    with pytest.raises(InputError, match="0 clean documents of 200 characters and more; 200 are needed"):
        made.learn(tmp_path, [Document("d", "short", "s", "d")] * 300, tmp_path, Silent())
