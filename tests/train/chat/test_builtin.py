"""Conversations that come with penjing: the same on every machine, right where they are chosen and wrong where not."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.core.progress import PlainProgress, Silent
from penjing.train.chat.builtin import COMPARED, SUMS, builtin_rows
from penjing.train.chat.rows import take_rows
from penjing.train.chat.tokens import ChatTokens

SUM = re.compile(r"(\d+) \+ (\d+) = (\d+)")


def test_sums_are_the_same_on_every_machine() -> None:
    rows = list(builtin_rows("builtin:sums"))
    first = rows[0]["messages"]
    assert [each["content"] for each in first] == ["How much are 20 and 19 together?", "20 + 19 = 39"]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "03d62080429075a3fb474df624db089398bd05a189f27c612cdf51020232780c"


@pytest.mark.parametrize(("source", "digits"), [("builtin:sums", {1, 2}), ("builtin:large-sums", {3})])
def test_the_chosen_answer_is_right_and_the_rejected_one_wrong(source: str, digits: set[int]) -> None:
    rows = list(builtin_rows(source))
    asked = {row["prompt"][0]["content"] for row in rows}
    assert len(rows) == len(asked) == SUMS
    for row in rows:
        question, answer = (each["content"] for each in row["messages"])
        assert row["prompt"][0]["content"] == question
        assert row["chosen"][0]["content"] == answer
        (right, wrong) = (SUM.fullmatch(row[side][0]["content"]) for side in ("chosen", "rejected"))
        assert right is not None
        assert wrong is not None
        a, b, said = map(int, right.groups())
        assert re.findall(r"\d+", question) == [str(a), str(b)] == list(wrong.groups()[:2])
        assert {len(str(a)), len(str(b))} <= digits
        assert said == a + b == int(row["answer"]) != int(wrong[3])
        assert int(wrong[3]) > 0


def test_a_sum_is_compared_with_answers_of_others() -> None:
    rows, sums = list(builtin_rows("builtin:sums-compared")), list(builtin_rows("builtin:sums"))
    assert [row["prompt"] for row in rows[::COMPARED]] == [row["prompt"] for row in sums]
    wrong: dict[str, set[str]] = {}
    for row in rows:
        assert row["chosen"] == [row["messages"][-1]]
        said = row["rejected"][0]["content"]
        assert said.rpartition(" = ")[0] == row["chosen"][0]["content"].rpartition(" = ")[0]
        wrong.setdefault(row["chosen"][0]["content"], set()).add(said)
    assert all(len(some) == COMPARED and right not in some for right, some in wrong.items())
    numbers = [int(said.rpartition(" ")[2]) for some in wrong.values() for said in some]
    assert min(numbers) == 2
    assert max(numbers) == 80


def test_they_are_conversations_and_pairs(tiny_checkpoint: Path) -> None:
    writer = ChatTokens.from_folder(tiny_checkpoint)
    texts, taken = take_rows(["builtin:sums"], writer.masked, 0.0, Silent())
    assert str(taken) == f"{SUMS} rows"
    assert writer.tokenizer.decode(texts[0].ids[texts[0].learnt]).startswith("20 + 19 = 39")
    pairs, _ = take_rows(["builtin:sums"], writer.pair, 0.0, Silent())
    assert writer.tokenizer.decode(pairs[0].rejected).startswith("20 + 19 = 40")


def test_reading_has_ended_when_the_rows_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    take_rows(["builtin:sums"], dict, 0.0, PlainProgress())
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"reading conversations: \d\.\d s", said[0]), said
    assert said[1:] == [f"data.sources: {SUMS} rows"]


def test_a_name_that_is_unknown_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        InputError,
        match=r"'builtin:prose' is unknown; choose builtin:sums, builtin:sums-compared, builtin:large-sums, builtin:q",
    ):
        take_rows(["builtin:prose"], dict, 0.0, Silent())
    with pytest.raises(InputError, match=r"chats.jsonl does not exist; .*, or builtin:sums"):
        take_rows(["chats.jsonl"], dict, 0.0, Silent())
