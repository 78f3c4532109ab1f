"""Documents made of others: what WordNet's files give, what a sentence must keep, translators that fail, and that no
model is judged by what was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError, SetupError
from penjing.core.progress import Silent
from penjing.core.text.records import Record
from penjing.curate.augment import translate
from penjing.curate.augment.check import Checker
from penjing.curate.augment.sentences import marks_of, negations_of, one_line, overlap, sentences_of
from penjing.curate.augment.synonyms import with_synonyms
from penjing.curate.augment.translate import Apertium, CTranslate2
from penjing.curate.augment.wordnet import load_wordnet
from penjing.curate.documents.document import Document, stored_documents
from penjing.curate.run import curate_recipe
from penjing.curate.steps import augment
from penjing.curate.steps.augment import AugmentStep
from penjing.curate.steps.decontaminate import Decontaminate
from penjing.curate.why import explain
from penjing.train.data.survey import survey
from tests.curate.corpus import recipe, write_lines

SENSES = {  # part: synonym sets, each (offset, words, uses of each as this sense)
    "noun": [
        (10, ["car", "auto"], [70, 3]),
        (11, ["bank", "shore"], [5, 5]),
        (12, ["bank", "till"], [4, 2]),
        (13, ["loads", "dozens"], [9, 8]),
        (14, ["load"], [3]),
    ],
    "verb": [(20, ["buy", "purchase"], [30, 9]), (21, ["stop", "halt"], [30, 4])],
    "adj": [(30, ["quick", "Fast"], [9, 9])],
    "adv": [(40, ["quickly", "rapidly"], [20, 7]), (41, ["but", "merely"], [9, 8])],
}
KINDS = {"noun": 1, "verb": 2, "adj": 3, "adv": 4}


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    """A folder of WordNet's files, of a few words."""
    folder = tmp_path / "wordnet"
    folder.mkdir()
    counts = []
    for part, sets in SENSES.items():
        data, places = ["  1 a licence"], dict[str, list[int]]()
        for offset, words, uses in sets:
            said = " ".join(f"{word} 0" for word in words)
            data.append(f"{offset:08} 03 {part[0]} {len(words):02x} {said} 000 | meaning")
            for word, use in zip(words, uses, strict=True):
                places.setdefault(word.lower(), []).append(offset)
                counts.append(f"{word.lower()}%{KINDS[part]}:03:00:: {len(places[word.lower()])} {use}")
        index = ["  1 a licence"]
        for word, offsets in places.items():
            index.append(f"{word} n {len(offsets)} 0 {len(offsets)} 1 {' '.join(f'{each:08}' for each in offsets)}  ")
        (folder / f"data.{part}").write_text("\n".join(data) + "\n")
        (folder / f"index.{part}").write_text("\n".join(index) + "\n")
    (folder / "cntlist.rev").write_text("\n".join(counts) + "\n")
    (folder / "verb.exc").write_text("bought buy\n")
    return folder


def test_words_have_synonyms_where_one_sense_is_common(wordnet: Path) -> None:
    words = load_wordnet(wordnet)
    assert words.synonyms("car") == ("auto",)
    assert words.synonyms("cars") == ("autos",)
    assert words.synonyms("quickly") == ("rapidly",)
    assert words.synonyms("stopped") == ("halted",)
    assert words.synonyms("stops") == ("halts",)
    assert words.synonyms("purchases") == ()  # buy has irregular forms
    assert words.synonyms("but") == ()  # a word of grammar
    assert words.synonyms("loads") == ()  # many, or what somebody does
    assert words.synonyms("bank") == ()
    assert words.synonyms("quick") == ()
    assert words.synonyms("nothing") == ()


def test_files_that_are_no_wordnet_are_refused(wordnet: Path) -> None:
    (wordnet / "data.verb").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"data\.verb is no file of WordNet"):
        load_wordnet(wordnet)
    (wordnet / "data.verb").write_text("oops\n")
    with pytest.raises(InputError, match="no line of WordNet"):
        load_wordnet(wordnet)
    (wordnet / "index.adv").unlink()
    with pytest.raises(InputError, match=r"lacks index\.adv"):
        load_wordnet(wordnet)


def test_names_articles_and_joined_words_stay(wordnet: Path) -> None:
    words, dice = load_wordnet(wordnet), np.random.default_rng(0)
    assert with_synonyms("Two cars stopped quickly.", words, 1.0, dice) == "Two autos halted rapidly."
    same = "A car, a non-car, the car's, car.py and Car."
    assert with_synonyms(same, words, 1.0, dice) == same
    assert with_synonyms("Two cars.", words, 1e-9, dice) == "Two cars."


def test_prose_alone_is_said_otherwise() -> None:
    text = (
        "A heading\n=========\n\nThe first sentence is wrapped\nover two lines. It ends here, and the next begins.\n\n"
        "    x = call(all, of, this, code)\n\nCall `make` when it is done in the folder.\n\n* a list of some words.\n"
    )
    found = [one_line(text[begin:end]) for begin, end in sentences_of(text)]
    assert found == ["The first sentence is wrapped over two lines.", "It ends here, and the next begins."]
    assert marks_of("On Monday 3 files of Ann Lee went to io.open.")["Lee"] == 1
    assert set(marks_of("So 3.5 of <EMAIL_1> is in numPy or IBM.")) == {"3.5", "<EMAIL_1>", "numPy", "IBM"}
    assert negations_of("It isn't, and no one cannot.") == 3
    assert overlap("a b c d e f g", "a b c d e f g") == 1.0
    assert overlap("a b c d e", "v w x y z") == 0.0


@pytest.mark.parametrize(
    ("sentence", "made", "reason"),
    [
        ("The car is red today.", "The car is red today.", "unchanged"),
        ("The car is red today.", "Red.", "length"),
        ("The 3 cars are red today.", "The 4 cars are red today.", "names and numbers"),
        ("We saw Paris in the rain.", "We saw Pairs in the rain.", "names and numbers"),
        ("It returns None at the end.", "It returns Any at the end.", "names and numbers"),
        ("It is not red at all.", "It is now red at all.", "negation"),
        ("The car is red today.", "Das auto ist heute rot.", "language"),
        ("The car is red today.", "The cow is red today.", "meaning"),
        ("The car is red today.", "The auto is red today.", ""),
    ],
)
def test_a_changed_sentence_keeps_what_it_says(sentence: str, made: str, reason: str) -> None:
    def encoder(text: str) -> np.ndarray:
        return np.array([1.0, 0.0] if "cow" not in text else [0.0, 1.0], np.float32)

    assert Checker(encoder, lambda text: "de" if "Das" in text else "en", 0.8).wrong(sentence, made) == reason


PROGRAMS = {  # in place of apertium's: the text between marks, every word of the "language" turned round
    "apertium-destxt": "cat", "lt-proc": 'test "$1" = -n && tr a-z b-za', "apertium-retxt": "cat",
}  # fmt: skip


@pytest.fixture
def apertium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a made-up apertium whose translation moves each letter on by one."""
    root = tmp_path / "apertium"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/share/apertium/modes").mkdir(parents=True)
    for name, command in PROGRAMS.items():
        program(root, name, command)
    (root / "usr/share/apertium/modes/eng-spa.mode").write_text("lt-proc $1 '/usr/share/apertium/x.bin' | cat $2\n")
    monkeypatch.setattr(translate, "apertium_folders", lambda pair: (root,))
    return root


def program(root: Path, name: str, command: str) -> None:
    (root / "usr/bin" / name).write_text(f"#!/bin/sh\n{command}\n")
    (root / "usr/bin" / name).chmod(0o755)


def test_apertiums_chain_is_that_of_its_mode(apertium: Path) -> None:
    assert Apertium("eng-spa", "eng-spa")(["abc abc.", "bcd\nbcd."]) == ["bcd bcd.", "cde cde."]
    with pytest.raises(InputError, match="has no mode spa-eng; it has eng-spa"):
        Apertium("eng-spa", "spa-eng")


def test_a_translator_that_fails_ends_the_run(apertium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(apertium, "lt-proc", "echo no such dictionary >&2; exit 3")
    with pytest.raises(SetupError, match="no such dictionary"):
        Apertium("eng-spa", "eng-spa")(["abc."])
    program(apertium, "lt-proc", "kill -9 $$")
    with pytest.raises(SetupError, match="lt-proc failed"):
        Apertium("eng-spa", "eng-spa")(["abc."])
    program(apertium, "lt-proc", "head -1")
    assert Apertium("eng-spa", "eng-spa")(["abc.", "bcd."]) is None
    monkeypatch.setattr(translate, "_SECONDS", 0.2)
    program(apertium, "lt-proc", "exec sleep 60")
    with pytest.raises(SetupError, match="gave no answer"):
        Apertium("eng-spa", "eng-spa")(["abc."])
    (apertium / "usr/share/apertium/modes/eng-spa.mode").write_text("no-such-program-of-apertium\n")
    with pytest.raises(SetupError, match="no-such-program-of-apertium is missing"):
        Apertium("eng-spa", "eng-spa")(["abc."])


def test_a_folder_of_a_model_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"lacks model\.bin, config\.json, source\.spm"):
        CTranslate2(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"method": "synonyms", "pair": "eng-cat"}, "pair is of method"),
        ({"method": "back translation", "copies": 2}, "copies is of method"),
        ({"method": "back translation", "there": "a"}, "there and back belong"),
        ({"method": "back translation", "translator": "ctranslate2"}, "there and back belong"),
    ],
)
def test_settings_of_another_method_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_config(AugmentStep, {"kind": "augment"} | values, "test")


class Nearly:
    """In place of an encoder: every text means the same."""

    def __init__(self, folder: Path, windows: int) -> None:
        pass

    def __call__(self, text: str) -> np.ndarray:
        return np.array([1.0], np.float32)


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an encoder for which all texts are alike; and no model of languages."""
    monkeypatch.setattr(augment, "DocumentEncoder", Nearly)
    monkeypatch.setattr(augment, "language_model", lambda: None)
    monkeypatch.setattr(augment, "fetch_package", lambda *_: None)
    monkeypatch.setattr(augment, "detect", lambda *_: ("en", 1.0))
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "penjing.json").write_text("{}")
    return tmp_path / "encoder"


TEXT = "The car of {} stopped quickly before the long bridge. We buy cars, and they stopped quickly here."


def documents(output: Path) -> list[Document]:
    return [each for path in sorted((output / "shards").glob("*.parquet")) for each in stored_documents(path)]


@pytest.mark.parametrize("workers_and_size", [(1, 64), (1, 1e-6)])
def test_what_is_made_is_marked_and_goes_through_later_steps(
    tmp_path: Path, wordnet: Path, encoder: Path, workers_and_size: tuple[int, float]
) -> None:
    for name in ("Ann", "Bob"):
        write_lines(tmp_path / f"{name}.jsonl", [TEXT.format(name), "no prose here"])
    step = {"kind": "augment", "method": "synonyms", "share": 1.0, "wordnet": str(wordnet), "encoder": str(encoder)}
    masks = {"kind": "decontaminate", "against": [str(tmp_path / "bob.txt")], "words": 5}
    (tmp_path / "bob.txt").write_text("The auto of Bob halted in winter.")
    sources = [{"name": name, "path": str(tmp_path / f"{name}.jsonl"), "domain": "d"} for name in ("Ann", "Bob")]
    workers, size = workers_and_size
    made = recipe(tmp_path, tmp_path, sources=sources, steps=[step, masks], workers=workers, task_mb=size)
    report = curate_recipe(made, "test")
    found = {each.id: each for each in documents(made.output)}
    variant = found["Ann/Ann.jsonl, line 1, synonyms 1"]
    assert variant.text == (
        "The auto of Ann halted rapidly before the long bridge. We buy autos, and they halted rapidly here."
    )
    assert variant.made == "synonyms"
    assert variant.cluster == "Ann/Ann.jsonl, line 1"
    assert len(found) == 5
    assert "Bob/Bob.jsonl, line 1, synonyms 1" not in found
    assert [(row.step, row.documents) for row in report.funnel][1:] == [("0: augment", 6), ("1: decontaminate", 5)]
    assert {row.outcome: row.number for row in report.made}["made"] == 2
    assert "made by synonyms" in explain("synonyms 1", made.output)[0]


def test_of_damaged_documents_the_made_ones_are_part_of_the_whole(
    tmp_path: Path, wordnet: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that failed on what another step had made was held against what was read alone: 2 of 2 were damaged."""

    def apply(self: Decontaminate, document: Document) -> str | None:
        if document.made:
            raise ValueError("not this one")
        return None

    monkeypatch.setattr(Decontaminate, "apply", apply)
    (tmp_path / "bob.txt").write_text("The auto of Bob halted in winter.")
    write_lines(tmp_path / "in.jsonl", [TEXT.format("Ann"), TEXT.format("Bob")])
    step = {"kind": "augment", "method": "synonyms", "share": 1.0, "wordnet": str(wordnet), "encoder": str(encoder)}
    against = {"kind": "decontaminate", "against": [str(tmp_path / "bob.txt")]}
    made = recipe(tmp_path, tmp_path / "in.jsonl", steps=[step, against], most_damaged=0.4)
    with pytest.raises(InputError, match=r"2 of 4 documents are damaged, more than most_damaged = 0\.4"):
        curate_recipe(made, "test")
    report = curate_recipe(made.model_copy(update={"most_damaged": 0.5}), "test")
    assert (report.read.documents, report.damaged, report.kept.documents) == (2, 2, 2)


def test_a_dead_translator_ends_the_run_and_costs_no_document(
    tmp_path: Path, apertium: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(augment, "apertium_folders", lambda pair: (apertium,))
    (apertium / "usr/share/apertium/modes/spa-eng.mode").write_text("apertium-destxt\n")
    program(apertium, "lt-proc", "exit 9")
    write_lines(tmp_path / "in.jsonl", [TEXT.format("Ann")])
    step = {"kind": "augment", "method": "back translation", "encoder": str(encoder)}
    made = recipe(tmp_path, tmp_path / "in.jsonl", steps=[step])
    with pytest.raises(SetupError, match="lt-proc failed"):
        curate_recipe(made, "test")
    assert not made.output.exists()
    program(apertium, "lt-proc", "cat")
    curate_recipe(made, "test")
    assert [each.made for each in documents(made.output)] == [""]  # what came back is what was there


def test_duplicates_are_dropped_before_more_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dedup stands behind augment"):
        recipe(tmp_path, tmp_path, steps=[{"kind": "augment", "method": "synonyms"}, {"kind": "dedup"}])


def rows(number: int, **fields: Any) -> list[tuple[Record, str]]:
    dice = np.random.default_rng(5)
    texts = [" ".join(map(str, dice.integers(0, 999, 60))) for _ in range(number)]
    return [(Record(f"{place}", text, fields={"cluster": "", **fields}), "s") for place, text in enumerate(texts)]


def text_of(record: Record) -> str:
    return record.text or ""


def test_what_was_made_is_never_held_out(tmp_path: Path) -> None:
    whole = rows(200)
    made = [
        (Record(f"{each.name}+", f"{each.text} more", fields={"cluster": f"c{each.name}", "made": "synonyms"}), "s")
        for each, _ in whole
    ]
    whole = [(Record(each.name, each.text, fields={"cluster": f"c{each.name}"}), "s") for each, _ in whole]
    found = survey([*whole, *made], text_of, 0.1, 0.01, tmp_path, Silent())
    originals, variants = found.trained[:200], found.trained[200:]
    held = originals == 0
    assert 5 < held.sum() < 40
    assert (variants[held] == -1).all()
    assert (variants[~held] > 0).all()
    assert found.parts(200 + int(np.flatnonzero(held)[0]), "text") == ("", "")
    with pytest.raises(InputError, match="made of others"):
        survey(made, text_of, 0.1, 0.01, tmp_path, Silent())


def test_documents_whose_cluster_is_not_known_are_no_cluster(tmp_path: Path) -> None:
    found = survey(rows(200), text_of, 0.1, 0.01, tmp_path, Silent())
    assert 5 < (found.trained == 0).sum() < 40
