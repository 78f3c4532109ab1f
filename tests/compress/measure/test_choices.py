"""Multiple-choice files: the forms of lm-eval's tasks, the text that is made of them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penjing.compress.measure.choices import Question, read_questions
from penjing.core.errors import InputError

ARC = {
    "question": "What falls?",
    "choices": {"text": ["rain", "smoke", "light"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}
HELLASWAG = {
    "activity_label": "Cooking",
    "ctx_a": "A cook [header] takes a pan.",
    "ctx_b": "the cook",
    "endings": ["sings [title] Then [substeps] stops.", "fries an egg."],
    "label": "1",
}


def read(tmp_path: Path, *lines: Any) -> list[tuple[int, Question]]:
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_questions(path, "measure.choices")


def test_each_form_is_read_as_lm_eval_reads_it(tmp_path: Path) -> None:
    plain = {"query": "One and one is", "choices": ["two", "three"], "gold": 0}
    found = read(tmp_path, plain, "", ARC, HELLASWAG, {"ctx": "It is", "endings": ["so", "not"], "label": 0})
    assert found == [
        (1, Question("One and one is", ("two", "three"), 0)),
        (3, Question("Question: What falls?\nAnswer:", ("rain", "smoke", "light"), 1)),
        (
            4,
            Question("Cooking: A cook takes a pan. The cook", ("sings. Then stops.", "fries an egg."), 1),
        ),
        (5, Question("It is", ("so", "not"), 0)),
    ]


def test_a_line_ends_at_its_newline_alone_and_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    """JSON lets other separators of lines stand inside a text as they are."""
    plain = {"query": "One\u2028and\x85two", "choices": ["a", "b\u2029c"], "gold": 1}
    path = tmp_path / "file.jsonl"
    line = json.dumps(plain, ensure_ascii=False)
    path.write_text(f"\ufeff{line}\r\n{line}\r\n", encoding="utf-8", newline="")
    question = Question("One\u2028and\x85two", ("a", "b\u2029c"), 1)
    assert read_questions(path, "measure.choices") == [(1, question), (2, question)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{oops", "line 1: not JSON"),
        ("[]", "line 1: an object with query, question, endings is needed"),
        ({"prompt": "a"}, "line 1: an object with query, question, endings"),
        ({"query": "a", "choices": ["b", "c"]}, "line 1: a field is missing .*'gold'"),
        ({"query": "a", "choices": ["b", "c"], "gold": 2}, r"the right choice is 2 \(from 0\) of 2"),
        ({"query": "a", "choices": ["b", "c"], "gold": -1}, "the right choice is -1"),
        ({"query": "a", "choices": ["b"], "gold": 0}, "two choices or more"),
        ({"query": "a", "choices": ["b", " "], "gold": 0}, "texts that are not empty"),
        ({"query": "a", "choices": [1, 2], "gold": 0}, "texts that are not empty"),
        (ARC | {"answerKey": "D"}, "a field is missing or of another kind"),
        (ARC | {"choices": {"text": ["rain"], "label": ["A", "B"]}}, "2 labels for 1 texts"),
        ("", "has no question"),
    ],
)
def test_what_is_no_question_is_named_with_its_line(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read(tmp_path, line)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"measure.choices: .*none.jsonl cannot be read"):
        read_questions(tmp_path / "none.jsonl", "measure.choices")
