"""Documents out to people and judgements back: the forms of Label Studio and Argilla, agreement beside crowd-kit's, and
labels that the step `quality` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from penjing.core.errors import InputError
from penjing.curate.annotate.agreement import dawid_skene
from penjing.curate.annotate.tiers import agree, ask
from penjing.curate.learned.labels import read_labels
from tests.curate.corpus import kept, prose, recipe, write_lines

REFERENCE = Path(__file__).parents[1] / "reference" / "dawid_skene.json"


def test_labels_and_errors_are_crowd_kits() -> None:
    known = json.loads(REFERENCE.read_text())
    found = dawid_skene([tuple(each) for each in known["answers"]], 40, 5, 3)
    np.testing.assert_allclose(found.label, known["label"], atol=1e-9)
    np.testing.assert_allclose(found.error, known["error"], atol=1e-9)
    np.testing.assert_allclose(found.share, known["share"], atol=1e-9)


def test_planted_errors_are_found_and_outvoted() -> None:
    dice = np.random.default_rng(3)
    right = dice.integers(2, size=400)
    skill = [0.95, 0.9, 0.55, 0.55, 0.1]  # two guess, one says the opposite
    answers = [
        (task, judge, int(right[task] if dice.random() < skill[judge] else 1 - right[task]))
        for task in range(400)
        for judge in range(5)
    ]
    found = dawid_skene(answers, 400, 5, 2)
    assert np.abs(found.skill - skill).max() < 0.07
    assert (found.label.argmax(1) == right).mean() > 0.96  # by majority 0.87


def made_corpus(folder: Path, number: int = 6) -> Path:
    write_lines(folder / "in.jsonl", [prose(each) for each in range(number)])
    made = recipe(folder, folder / "in.jsonl")
    kept(made)
    return made.output


def answered(tasks: Path, form: str, labels: dict[str, list[str]]) -> Path:
    """An export of `tasks` with judges' labels by the last sign of the document's id."""
    found: list[dict[str, Any]] = json.loads(tasks.read_text())
    for task in found:
        if form == "label-studio":
            given = labels[task["data"]["id"][-1]]
            task["annotations"] = [
                {
                    "completed_by": {"email": f"judge{place}@firm.org"},
                    "was_cancelled": False,
                    "result": [
                        {"type": "choices", "from_name": "label", "to_name": "text", "value": {"choices": [label]}}
                    ],
                }
                for place, label in enumerate(given)
            ]
        else:
            given = labels[task["id"][-1]]
            rows = [{"user_id": f"u{place}", "value": label} for place, label in enumerate(given)]
            task["responses"] = {"label": rows}
    path = tasks.with_name("export.json")
    path.write_text(json.dumps(found))
    return path


@pytest.mark.parametrize("form", ["label-studio", "argilla"])
def test_tasks_come_back_as_labels_to_learn_from(tmp_path: Path, form: Any) -> None:
    corpus = made_corpus(tmp_path)
    tasks = tmp_path / "tasks.json"
    assert ask(corpus, tasks, form, 100, ("good", "bad"))["documents"] == 6
    if form == "label-studio":
        choices = ElementTree.parse(tmp_path / "tasks.json.xml").iter("Choice")
        assert [each.get("value") for each in choices] == ["good", "bad"]
    said = {str(place): ["good" if place % 2 else "bad"] * 3 for place in range(1, 6)} | {"6": ["good", "bad"]}
    export = answered(tasks, form, said)
    export.write_text(export.read_text(encoding="utf-8"), encoding="utf-8-sig")  # as some tools save it
    found = agree([export], tmp_path / "labels.jsonl", tmp_path / "experts.json", least=0.999, form=form)
    assert (found["settled"], found["for experts"]) == (5, 1)
    labels = read_labels(tmp_path / "labels.jsonl")
    assert sorted(each.value for each in labels) == [0, 0, 1, 1, 1]
    assert len(json.loads((tmp_path / "experts.json").read_text())) == 1


def test_some_domains_are_for_experts(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.json"
    ask(made_corpus(tmp_path), tasks, "label-studio", 100, ("good", "bad"))
    export = answered(
        tasks, "label-studio", {str(place): ["good" if place > 3 else "bad"] * 3 for place in range(1, 7)}
    )
    found = agree([export], tmp_path / "l.jsonl", tmp_path / "e.json", expert_domains=("made",))
    assert (found["settled"], found["for experts"]) == (0, 6)


def line(**changes: Any) -> str:
    return json.dumps({"id": "a", "text": "some text", "annotator": "x", "label": "good"} | changes) + "\n"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", "{", "no JSON"),
        ("a.json", "{}", "no list"),
        ("a.json", "[3]", "task 1 is no task"),
        ("a.json", '[{"text": "t", "label": "good"}]', "JSON-MIN"),
        ("a.json", '[{"annotations": [{"completed_by": 1, "result": [{"type": "choices"}]}]}]', "0 choices"),
        ("a.json", '[{"annotations": []}]', "no answers"),
        ("a.jsonl", line(annotator=None), "names no judge"),
        ("a.jsonl", line(label=""), "names no label"),
        ("a.jsonl", line() + line(), "answered twice"),
        ("a.jsonl", line() + line(annotator="y"), "every answer is 'good'"),
        ("a.jsonl", "{oops\n", "line 1"),
    ],
)  # fmt: skip
def test_answers_that_are_none_are_refused_by_name(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=said):
        agree([tmp_path / name], tmp_path / "labels.jsonl", tmp_path / "experts.json")
    assert not (tmp_path / "labels.jsonl").exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    corpus = made_corpus(tmp_path)
    (tmp_path / "tasks.json").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        ask(corpus, tmp_path / "tasks.json", "argilla", 5, ("good", "bad"))
    with pytest.raises(InputError, match="two and more"):
        ask(corpus, tmp_path / "other.json", "argilla", 5, ("good",))
    with pytest.raises(InputError, match="no document of law"):
        ask(corpus, tmp_path / "other.json", "argilla", 5, ("good", "bad"), ("law",))
    with pytest.raises(InputError, match="no corpus"):
        ask(tmp_path, tmp_path / "other.json", "argilla", 5, ("good", "bad"))
