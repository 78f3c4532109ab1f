"""Calls in a text that comes in any pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.front.tools import CallReader

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a <b> ü"}}\n</tool_call>'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader()
    found = [reader.push(piece) for piece in pieces] + [reader.push("", last=True)]
    calls = [call for each in found for call in each.calls]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    text = "".join(each.text for each in found)
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


LOOK = ("look", '{"at": "a <b> ü"}')


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("", "", []),
        ("a < b <tool", "a < b <tool", []),
        (CALL, "", [LOOK]),
        (f"I look.\n{CALL}\n{CALL}", "I look.\n", [LOOK, LOOK]),
        ("<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", []),
        ('<tool_call>\n{"name": "lo', '<tool_call>\n{"name": "lo', []),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")]),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
    ],
)
def test_whole(text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == (shown, calls)
    for call in calls:
        json.loads(call[1])


@given(
    st.lists(
        st.sampled_from(["I say <", "<tool_call>", "</tool_call>", CALL, '{"name": "x"}', "\n", "tool"]), max_size=8
    ),
    st.data(),
)
def test_pieces_do_not_matter(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, calls = read(pieces)
    once, expected = read([text])
    assert ("".join(shown.split()), calls) == ("".join(once.split()), expected)  # blanks between calls are nobody's
