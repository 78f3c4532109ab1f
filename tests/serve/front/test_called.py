"""Answers with calls of tools, in each interface's words: streamed in any pieces they are what they are as a whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penjing.serve.front.bodies import ChatBody
from tests.serve.front.scripted import ScriptedFront

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    MESSAGES: {"messages": USER, "max_tokens": 9, "tools": [{"name": "f", "input_schema": SCHEMA}]},
    RESPONSES: {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
Said = list[tuple[str, str]]
"""What an answer says and calls, in its order; a chat's has the text first."""


@pytest.fixture(scope="module")
def front() -> Iterator[ScriptedFront]:
    with ScriptedFront() as front:
        yield front


def whole(front: ScriptedFront, path: str) -> Said:
    answer = front.ask(path, BODIES[path] | {"model": "m"})
    assert answer.status == 200
    if path == CHAT:
        message = answer.json["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        return [("text", message["content"] or ""), *(("call", call["function"]["arguments"]) for call in calls)]
    if path == MESSAGES:
        blocks = answer.json["content"]
        return [("text", b["text"]) if b["type"] == "text" else ("call", written(b["input"])) for b in blocks]
    items = answer.json["output"]
    texts = [item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in items]
    return [("text" if item["type"] == "message" else "call", text) for item, text in zip(items, texts, strict=True)]


def written(value: dict[str, Any]) -> str:
    return "{" + ", ".join(f'"{key}": {number}' for key, number in value.items()) + "}"


def streamed(front: ScriptedFront, path: str) -> Said:
    events = front.events(path, BODIES[path] | {"model": "m"})
    said: Said = [("text", "")] if path == CHAT else []
    for event in events:
        assert "error" not in event or event["error"] is None
        if path == CHAT:
            delta = event["choices"][0]["delta"]
            said[0] = ("text", said[0][1] + delta.get("content", ""))
            for call in delta.get("tool_calls", ()):
                said += [("call", "")] if "id" in call else []
                said[-1] = ("call", said[-1][1] + call["function"]["arguments"])
            continue
        if event["type"] in ("content_block_start", "response.output_item.added"):
            kind = event.get("content_block", event.get("item"))["type"]
            said.append(("text" if kind in ("text", "message") else "call", ""))
        elif event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
            said[-1] = (said[-1][0], said[-1][1] + event["delta"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            said[-1] = (said[-1][0], said[-1][1] + delta.get("text", "") + delta.get("partial_json", ""))
    assert path == CHAT or events[-1]["type"] in ("message_stop", "response.completed")
    return said


@pytest.mark.parametrize("path", BODIES)
@given(st.lists(st.sampled_from(["Hi there. ", "ok", "\n", CALL, CALL + "\n"]), min_size=1, max_size=5), st.data())
def test_a_stream_says_what_the_whole_answer_says(
    front: ScriptedFront, path: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    front.script.pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert streamed(front, path) == whole(front, path)


def test_a_call_that_a_stop_text_cuts_off_is_not_told_as_complete(front: ScriptedFront) -> None:
    front.script.pieces, front.script.reason = ['<tool_call>\n{"name": "f", "arguments": {"x": ', "1"], "stop"
    chat = front.events(CHAT, BODIES[CHAT] | {"model": "m"})
    message = front.events(MESSAGES, BODIES[MESSAGES] | {"model": "m"})
    response = front.events(RESPONSES, BODIES[RESPONSES] | {"model": "m"})
    assert chat[-1]["choices"][0]["finish_reason"] == "stop"
    assert message[-2]["delta"]["stop_reason"] == "end_turn"
    assert [item["status"] for item in response[-1]["response"]["output"]] == ["incomplete"]
    front.script.pieces = [CALL, '\n<tool_call>\n{"name": "f", "arguments": {"x": 1', "}"]  # only the mark is missing
    assert front.events(CHAT, BODIES[CHAT] | {"model": "m"})[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("length", range(CALL.rindex("}") + 1, len(CALL)))
def test_a_call_that_lacks_only_its_mark_is_one(front: ScriptedFront, path: str, length: int) -> None:
    """A whole answer told it as text: where the mark was a stop text, as other servers' clients ask for, or where no
    tokens were left for it."""
    front.script.pieces, front.script.reason = ["so ", CALL[:length]], "stop"
    assert streamed(front, path) == whole(front, path)
    assert whole(front, path)[-1] == ("call", '{"x": 1}')


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
def test_text_before_and_behind_a_call_keeps_its_place(front: ScriptedFront, path: str) -> None:
    text = f"Before.\n{CALL}\nAfter."
    front.script.pieces = [text]
    said = [("text", "Before.\n"), ("call", '{"x": 1}'), ("text", "\nAfter.")]
    assert whole(front, path) == streamed(front, path) == said
    at = text.index("1}")
    front.script.pieces = [text[:at], text[at:]]
    assert streamed(front, path) == said


@pytest.mark.parametrize("number", ["1e999", "-1e999", "0.1234567890123456789", "1e5"])
def test_arguments_are_shown_as_the_model_has_written_them(front: ScriptedFront, number: str) -> None:
    front.script.pieces = list(CALL.replace("1", number))
    for path in BODIES:
        said = [("call", f'{{"x": {number}}}')]
        assert streamed(front, path)[-1:] == said
        if path == MESSAGES:
            (block,) = front.ask(path, BODIES[path] | {"model": "m"}).json["content"]
            nearest = max(-sys.float_info.max, min(float(number), sys.float_info.max))
            assert block["input"] == {"x": nearest}
        else:
            assert whole(front, path)[-1:] == said


@pytest.mark.parametrize("value", ["9" * 5000, '"\\ud83d"', "NaN"], ids=["long", "half", "none"])
def test_a_stream_goes_on_behind_arguments_that_cannot_be_read(front: ScriptedFront, value: str) -> None:
    front.script.pieces = list(CALL.replace("1", value))
    for path in BODIES:
        assert streamed(front, path)[-1:] == [("call", f'{{"x": {value}}}')]
        assert front.ask(path, BODIES[path] | {"model": "m"}).status == 200


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 309 + ".0", "9" * 300 + "e10"], ids=range(4))
def test_a_body_has_finite_numbers_alone(front: ScriptedFront, number: str) -> None:
    for path in BODIES:
        body = json.dumps(BODIES[path] | {"model": "m", "tool_choice": "none"}).replace('"number"', number)
        answer = front.ask(path, raw=body.encode())
        assert answer.status == 400
        assert "64-bit floating point" in answer.json["error"]["message"]


def test_a_call_of_before_may_have_any_numbers() -> None:
    function = {"name": "f", "arguments": '{"x": [1e999]}'}
    message = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    (asked,) = ChatBody(model="m", messages=[message]).messages  # type: ignore[list-item]
    assert asked.rendered()["tool_calls"][0]["function"]["arguments"] == {"x": [sys.float_info.max]}
