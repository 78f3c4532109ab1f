"""Answers in other interfaces' words, without a server: any pieces add up to the same, in an order that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penjing.serve.client.wire_text import Chunk
from penjing.serve.dialects.message_writer import MessageWriter, StopText
from penjing.serve.dialects.response_body import ResponseBody
from penjing.serve.dialects.response_writer import ResponseWriter
from penjing.serve.dialects.writer import Said
from penjing.serve.front.answers import Ask
from penjing.serve.gate.config import FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
PIECES = st.lists(st.one_of(st.text(max_size=3), st.just(CALL)), max_size=8)


def asked() -> Ask:
    model = FrontModel(id="a", kind="llm", name="llm", folder=Path("a"), grpc="127.0.0.1:1", metrics="127.0.0.1:2")
    ask = Ask(model, {}, Exchange("id", completion_tokens=3))
    ask.tokens[0] = Chunk("", num_input_tokens=7, num_cached_tokens=2)
    return ask


def pieces_of(parts: list[Any], reason: str) -> list[Said]:
    found = [Said(part, [], [], None) if isinstance(part, str) else Said("", [part], [], None) for part in parts]
    return [*found, Said("", [], [], reason)]


def text_and_calls(output: list[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in output]


@given(PIECES, st.sampled_from(["stop", "length"]))
def test_events_of_a_response_are_those_that_the_package_knows(parts: list[Any], reason: str) -> None:
    writer = ResponseWriter(asked(), ResponseBody(model="a", input="b"))
    events = [event for said in pieces_of(parts, reason) for event in writer.push(said)]
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
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                grown[-1] += event["delta"]
            case "response.output_item.done":
                assert text_and_calls([event["item"]]) == grown[-1:]
    whole = writer.whole()
    assert text_and_calls(whole["output"]) == grown
    assert "".join(grown) == "".join(part if isinstance(part, str) else '{"at": 1}' for part in parts)
    assert whole["status"] == ("completed" if reason == "stop" else "incomplete")
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] == whole
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]) == (7, 3)


def test_a_response_that_fails_says_so_as_its_last_event() -> None:
    writer = ResponseWriter(asked(), ResponseBody(model="a", input="b"))
    writer.push(Said("some", [], [], None))
    events = writer.failed(ApiError(503, "The model went away; ask again.", code="not_ready"))
    for event in events:
        EVENTS.validate_python(event)
    assert [event["type"] for event in events][-2:] == ["response.output_item.done", "response.failed"]
    response = Response.model_validate(events[-1]["response"])
    assert response.status == "failed"
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", "The model went away; ask again.")
    assert response.output_text == "some"


@given(PIECES, st.sampled_from(["stop", "length"]))
def test_events_of_a_message_add_up_to_it(parts: list[Any], reason: str) -> None:
    writer = MessageWriter(asked(), StopText(()))
    events = [event for said in pieces_of(parts, reason) for event in writer.push(said)]
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
                grown[-1] += delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    whole = writer.whole()
    assert [block["text"] if block["type"] == "text" else '{"at": 1}' for block in whole["content"]] == grown
    assert "".join(grown) == "".join(part if isinstance(part, str) else '{"at": 1}' for part in parts)
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
