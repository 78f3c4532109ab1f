"""Answers in other interfaces' words, without a server: any pieces add up to the same, in an order that is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penjing.serve.client.wire_text import Chunk
from penjing.serve.dialects.message_writer import MessageWriter, StopText
from penjing.serve.dialects.response_body import ResponseBody
from penjing.serve.dialects.response_writer import ResponseWriter
from penjing.serve.dialects.writer import Said, respond
from penjing.serve.front.answers import Ask
from penjing.serve.front.backend import Backend
from penjing.serve.front.reading import Reading
from penjing.serve.gate.config import FrontConfig, FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange

WORDS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = {"index": 0, "id": "call_1", "type": "function"}
BODY = ResponseBody(model="a", input="b")
ARGUMENTS = '{"at": 1}'
THOUGHTS = st.lists(st.text(min_size=1, max_size=3), max_size=3)
PIECES = st.lists(st.one_of(st.text(max_size=3), st.integers(0, len(ARGUMENTS))), max_size=8)
"""Texts, and calls: a number says after how many characters their arguments are cut in two."""


def asked() -> Ask:
    model = FrontModel(id="a", kind="llm", name="llm", folder=Path("a"), grpc="127.0.0.1:1", metrics="127.0.0.1:2")
    ask = Ask(model, {}, Exchange("id", completion_tokens=3))
    ask.tokens[0] = Chunk("", num_input_tokens=7, num_cached_tokens=2)
    return ask


def pieces_of(parts: list[Any], reason: str, thoughts: Sequence[str] = ()) -> list[Said]:
    found = [Said("", [], None, thought=thought) for thought in thoughts]
    for part in parts:
        if isinstance(part, str):
            found.append(Said(part, [], None))
            continue
        found.append(Said(CALL | {"function": {"name": "look", "arguments": ARGUMENTS[:part]}}, [], None))
        if rest := ARGUMENTS[part:]:
            found.append(Said({"index": 0, "function": {"arguments": rest}}, [], None))
    return [*found, Said("", [], reason)]


def text_and_calls(output: list[dict[str, Any]]) -> list[str]:
    return [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in output]


@given(PIECES, st.sampled_from(["stop", "length"]), THOUGHTS)
def test_events_of_a_response_are_those_that_the_package_knows(
    parts: list[Any], reason: str, thoughts: list[str]
) -> None:
    writer = ResponseWriter(asked(), ResponseBody(model="a", input="b"))
    events = [event for said in pieces_of(parts, reason, thoughts) for event in writer.push(said)]
    for number, event in enumerate(events):
        assert EVENTS.validate_python(event).type == event["type"]
        assert event["sequence_number"] == number
    Response.model_validate(writer.whole())
    grown: list[str] = []
    for event in events:
        index = event.get("output_index", len(grown) - 1)
        assert index == len(grown) - (event["type"] != "response.output_item.added")
        match event["type"]:
            case "response.output_item.added":
                grown.append("")
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                grown[-1] += event["delta"]
            case "response.output_item.done":
                assert text_and_calls([event["item"]]) == grown[-1:]
    whole = writer.whole()
    assert text_and_calls(whole["output"]) == grown
    assert "".join(grown) == "".join(thoughts) + "".join(part if isinstance(part, str) else ARGUMENTS for part in parts)
    assert whole["status"] == ("completed" if reason == "stop" else "incomplete")
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] == whole
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (7, 3)


class Letters:
    """A client whose model writes a call letter by letter."""

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Chunk, None]:
        text = f'<tool_call>{{"name": "look", "arguments": {ARGUMENTS}}}</tool_call>'
        for place, letter in enumerate(text):
            yield Chunk(letter, "stop" if place == len(text) - 1 else None, num_tokens=1)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("word", ["input_json_delta", "response.function_call_arguments.delta"])
def test_a_call_is_streamed_as_it_is_written(word: str) -> None:
    async def streamed() -> list[dict[str, Any]]:
        ask = asked()
        ask.stream, ask.messages = True, []
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=(ask.model,), log=Path("log")))
        upstream = backend.upstream(ask.model)
        await upstream.client.close()
        upstream.client = Letters()  # type: ignore[assignment]
        writer = MessageWriter(ask, StopText(())) if word[0] == "i" else ResponseWriter(ask, BODY)
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        response = await respond(backend, ask, writer, Reading(upstream, ask, None, tools=True))
        await response({"type": "http", "state": {"exchange": ask.exchange}}, AsyncMock(), send)
        await backend.close()
        return [json.loads(line[6:]) for line in b"".join(sent).splitlines() if line.startswith(b"data: ")]

    events = asyncio.run(streamed())
    deltas = [event["delta"] for event in events if event["type"] == word or word in str(event.get("delta"))]
    texts = [delta if isinstance(delta, str) else delta["partial_json"] for delta in deltas]
    assert texts == list(ARGUMENTS)


def test_a_call_that_is_cut_off_is_incomplete_and_one_that_is_whole_is_not() -> None:
    for size, status in ((4, "incomplete"), (len(ARGUMENTS), "completed")):
        (begun,) = (said for said in pieces_of([size], "length") if "id" in said.part)
        writer = ResponseWriter(asked(), ResponseBody(model="a", input="b"))
        writer.push(begun)
        events = writer.push(Said("", [], "length"))
        assert (events[1]["item"]["status"], events[1]["item"]["arguments"]) == (status, ARGUMENTS[:size])
        assert writer.whole()["status"] == "incomplete"
        message = MessageWriter(asked(), StopText(()))
        message.push(begun)
        message.push(Said("", [], "length"))
        assert message.whole()["content"][0]["input"] == ({} if size == 4 else {"at": 1})


def test_a_response_that_fails_says_so_as_its_last_event() -> None:
    writer = ResponseWriter(asked(), ResponseBody(model="a", input="b"))
    writer.push(Said("some", [], None))
    events = writer.failed(ApiError(503, "The model went away; ask again.", code="not_ready"))
    for event in events:
        EVENTS.validate_python(event)
    assert [event["type"] for event in events][-2:] == ["response.output_item.done", "response.failed"]
    response = Response.model_validate(events[-1]["response"])
    assert response.status == "failed"
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", "The model went away; ask again.")
    assert response.output_text == "some"


@given(PIECES, st.sampled_from(["stop", "length"]), THOUGHTS)
def test_events_of_a_message_add_up_to_it(parts: list[Any], reason: str, thoughts: list[str]) -> None:
    writer = MessageWriter(asked(), StopText(()))
    events = [event for said in pieces_of(parts, reason, thoughts) for event in writer.push(said)]
    types = pytest.importorskip("anthropic.types")
    for event in events:
        TypeAdapter(types.RawMessageStreamEvent).validate_python(event)
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert events[0]["message"]["content"] == []
    grown: list[str] = []
    is_open = False
    for event in events[1:-2]:
        assert event["index"] == len(grown) - (event["type"] != "content_block_start")
        match event["type"]:
            case "content_block_start":
                assert not is_open
                grown.append("")
            case "content_block_delta":
                delta = event["delta"]
                grown[-1] += delta[WORDS[delta["type"]]]
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    whole = writer.whole()
    types.Message.model_validate(whole)
    assert [block.get("text", block.get("thinking", ARGUMENTS)) for block in whole["content"]] == grown
    assert "".join(grown) == "".join(thoughts) + "".join(part if isinstance(part, str) else ARGUMENTS for part in parts)
    called = any(block["type"] == "tool_use" for block in whole["content"])
    assert whole["stop_reason"] == ("max_tokens" if reason == "length" else "tool_use" if called else "end_turn")
    assert whole["usage"] == events[-2]["usage"]
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (5, 2)


def test_a_message_that_fails_says_so_in_anthropics_words() -> None:
    (event,) = MessageWriter(asked(), StopText(())).failed(ApiError(504, "It took too long.", code="timeout"))
    error = {"message": "It took too long.", "type": "timeout_error", "param": None, "code": "timeout"}
    assert event == {"type": "error", "error": error, "request_id": "id"}


def test_the_text_that_ended_an_answer_is_cut_off_and_named() -> None:
    stop = StopText(["d", "bcd"], ["<end>"])
    assert (stop.cut("abcd"), stop.met) == ("a", "bcd")
    assert (stop.cut("abc<end>"), stop.met) == ("abc", None)
    assert (stop.cut("abc"), stop.met) == ("abc", None)
