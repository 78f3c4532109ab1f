"""Calls in a text that comes in any pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.front.tools import CallReader, Part, apart

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a <b> ü"}}\n</tool_call>'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader()
    text, calls = apart([part for piece in pieces for part in reader.push(piece)] + reader.push("", last=True))
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert len({call["id"] for call in calls}) == len(calls)
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


QUOTING = '<tool_call>{"arguments": {"it": "a </tool_call> b"}, "name": "say"}</tool_call>'
"""Arguments first: it cannot come piece by piece."""
LOOK = ("look", '{"at": "a <b> ü"}')


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        ("", "", []),
        ("a < b <tool", "a < b <tool", []),
        (CALL, "", [LOOK]),
        (f"I look.\n{CALL}\n{CALL}", "I look.\n", [LOOK, LOOK]),
        (f"{CALL}\n\nIt is there.\n\nBye.\n", "\n\nIt is there.\n\nBye.\n", [LOOK]),
        (f"{CALL}\n<tool_call>[]</tool_call>\n{CALL}\n", "\n<tool_call>[]</tool_call>\n", [LOOK, LOOK]),
        ("<tool_call>\nno JSON\n</tool_call>", "<tool_call>\nno JSON\n</tool_call>", []),
        ('<tool_call>\n{"name": "lo', '<tool_call>\n{"name": "lo', []),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", "{}")]),
        ('<tool_call>{"arguments": {"a": 1, "a":  1e0}, "name": "f"}</tool_call>', "", [("f", '{"a": 1, "a":  1e0}')]),
        ('<tool_call>{"name": "f", "arguments": 1, "arguments" : "x"}</tool_call>', "", [("f", '"x"')]),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", []),
        (QUOTING + "\n" + CALL, "", [("say", '{"it": "a </tool_call> b"}'), LOOK]),
        ('<tool_call>{"name": </tool_call> x', '<tool_call>{"name": </tool_call> x', []),
    ],
)
def test_whole(text: str, shown: str, calls: list[tuple[str, str]]) -> None:
    assert read([text]) == read(list(text)) == (shown, calls)
    for call in calls:
        json.loads(call[1])


def streamed(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """As a client of OpenAI's streams puts calls together."""
    reader = CallReader(partial=True)
    text, calls = "", list[list[str]]()
    for found in [reader.push(piece) for piece in pieces] + [reader.push("", last=True)]:
        said, deltas = apart(found)
        text += said
        assert len({delta["index"] for delta in deltas}) == len(deltas)
        for delta in deltas:
            if "id" in delta:
                assert (delta["index"], delta["type"]) == (len(calls), "function")
                calls.append([delta["function"]["name"], ""])
            assert delta["index"] == len(calls) - 1
            calls[-1][1] += delta["function"]["arguments"]
    assert reader.num_calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


def called(parts: list[Part]) -> dict[str, Any]:
    (part,) = parts
    assert isinstance(part, dict)
    return part


def test_a_call_is_shown_as_it_is_written() -> None:
    reader = CallReader(partial=True)
    assert reader.push('I say <tool_call>\n{"name": "lo') == ["I say "]
    assert not reader.push('ok", "arguments": ')
    begun = called(reader.push('{"at'))
    assert (begun["function"], begun["type"]) == ({"name": "look", "arguments": '{"at'}, "function")
    assert reader.push('": "}\\"') == [{"index": 0, "function": {"arguments": '": "}\\"'}}]
    assert reader.push('</tool_call>"}}') == [{"index": 0, "function": {"arguments": '</tool_call>"}'}}]
    second = called(reader.push('\n</tool_call>\n<tool_call>{"name": "b", "arguments": {}}</tool_call>', last=True))
    assert (second["index"], second["function"]) == (1, {"name": "b", "arguments": "{}"})


def test_a_call_that_is_cut_off_is_shown_as_far_as_it_came() -> None:
    assert streamed([CALL[:45]]) == ("", [("look", '{"a')])
    assert streamed([CALL[:20]]) == (CALL[:20], [])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "text ", "a < b\n"]),
            st.from_regex("[a-z_]{1,8}", fullmatch=True),
            st.dictionaries(st.text(), st.recursive(st.none() | st.text() | st.integers(), st.lists), max_size=3),
        ),
        max_size=3,
    ),
    st.data(),
)
def test_pieces_of_a_stream_make_the_whole_calls(
    parts: list[tuple[str, str, dict[str, Any]]], data: st.DataObject
) -> None:
    text = "".join(
        f"{said}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
        for said, name, arguments in parts
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, calls = streamed(pieces)
    assert shown == "".join(said for said, _, _ in parts)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [(name, given) for _, name, given in parts]


@given(
    st.lists(
        st.sampled_from(["I say <", "<tool_call>", "</tool_call>", CALL, QUOTING, '{"name": "x"}', "\n", "tool"]),
        max_size=8,
    ),
    st.data(),
)
def test_pieces_do_not_matter(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, calls = read(pieces)
    once, expected = read([text])
    assert (shown, calls) == (once, expected)
