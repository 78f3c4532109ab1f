"""The tasks of run_align.py: what is asked is never taught, and forms are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lib.align_tasks import compared, forms, is_valid, sums, things, worked, write_tasks
from run_align import PARTS, Bench, before_and_after


def test_the_model_that_starts_has_seen_none_of_the_sums() -> None:
    shown = [[message["content"] for message in row["messages"]] for row in worked()]
    assert not {asked for asked, _ in shown} & {row["prompt"] for row in sums()}
    assert all(int(said) == sum(map(int, asked.removesuffix("=?").split("+"))) for asked, said in shown)


def test_pairs_are_of_the_form_and_of_another() -> None:
    for row in forms():
        assert is_valid(row["chosen"][0]["content"])
        assert not is_valid(row["rejected"][0]["content"])


def test_compared_sums_are_right_and_wrong() -> None:
    rows = list(compared())
    assert {row["prompt"][0]["content"] for row in rows} == {row["prompt"] for row in sums()}
    for row in rows:
        total = sum(map(int, row["prompt"][0]["content"].removesuffix("=?").split("+")))
        assert row["chosen"][0]["content"] == str(total) != row["rejected"][0]["content"]


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"what": "pears", "many": 3}', True),
        ('{"what": "pears", "many": "3"}', False),
        ('{"what": "pears", "many": true}', False),
        ('{"what": "pears"}', False),
        ("3 pears", False),
        ("[]", False),
    ],
)
def test_answers_of_the_form(text: str, valid: bool) -> None:
    assert is_valid(text) == valid
    assert all(is_valid(row["messages"][1]["content"]) for row in things())


def test_tasks_are_files_of_rows(tmp_path: Path) -> None:
    write_tasks(tmp_path)
    for name in ("worked", "sums", "compared", "forms", "things"):
        assert [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]


def test_every_part_is_described_and_rows_tell_before_and_after() -> None:
    assert all(f"`{part}`" in (Bench.run.__globals__["__doc__"] or "") for part in PARTS)
    rows = before_and_after("grpo/right_sums", 0.25, 0.75, 3)
    assert [(row.metric, row.value, row.runs) for row in rows] == [
        ("grpo/right_sums_before", 0.25, 3), ("grpo/right_sums_after", 0.75, 3)
    ]  # fmt: skip
