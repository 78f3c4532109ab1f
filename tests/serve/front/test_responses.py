"""`/v1/responses` by OpenAI's own package, unmodified; the answers are those of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.responses import ParsedResponse, ResponseFunctionToolCall, ResponseOutputMessage

from tests.serve.front.asking import Fronted

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
PATH = "/v1/responses"
LOOK: Any = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["pine", "elm"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
}
TEXT_EVENTS = ["created", "in_progress", "output_item.added", "content_part.added"]
TEXT_END = ["output_text.done", "content_part.done", "output_item.done"]
CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


@pytest.fixture(scope="module")
def client(front: Fronted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def said(client: openai.OpenAI, messages: Any, **asked: Any) -> str:
    """What a chat answers."""
    found = client.chat.completions.create(model="llm", messages=messages, **asked)
    return found.choices[0].message.content or ""


def test_a_text_is_answered_as_a_chat_is(client: openai.OpenAI, front: Fronted) -> None:
    found = client.responses.create(model=front.model, input="hi", max_output_tokens=30, **GREEDY)
    assert found.output_text == said(client, [{"role": "user", "content": "hi"}], max_tokens=30, **GREEDY)
    (message,) = found.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "incomplete")
    assert (found.object, found.status, found.model) == ("response", "incomplete", front.model)
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert (found.error, found.previous_response_id, found.tools, found.tool_choice) == (None, None, [], "auto")
    usage = found.usage
    assert usage is not None
    assert (usage.output_tokens, usage.total_tokens) == (30, usage.input_tokens + 30)
    again = client.responses.create(model="llm", input="hi " * 200, max_output_tokens=1)
    again = client.responses.create(model="llm", input="hi " * 200, max_output_tokens=1)
    assert again.usage is not None
    assert 0 < again.usage.input_tokens_details.cached_tokens < again.usage.input_tokens


def test_items_are_the_messages_of_a_chat(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
        {"type": "message", "role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ]
    found = client.responses.create(
        model="llm", instructions="Be short.", input=items, max_output_tokens=20, metadata={"a": "b"}, **GREEDY
    )
    expected = [
        {"role": "system", "content": "Be short."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ]
    assert found.output_text == said(client, expected, max_tokens=20, **GREEDY)
    assert (found.instructions, found.metadata) == ("Be short.", {"a": "b"})
    # an answer goes on with what was answered before, as it came
    more = [*items, *found.output, {"role": "user", "content": "and"}]
    expected += [{"role": "assistant", "content": found.output_text}, {"role": "user", "content": "and"}]
    next_one = client.responses.create(
        model="llm", instructions="Be short.", input=more, max_output_tokens=20, **GREEDY
    )
    assert next_one.output_text == said(client, expected, max_tokens=20, **GREEDY)


def test_a_stream_has_the_order_of_openai_and_the_same_answer(client: openai.OpenAI, front: Fronted) -> None:
    asked: dict[str, Any] = {"model": front.model, "input": "hi", "max_output_tokens": 600, **GREEDY}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [*TEXT_EVENTS, *["output_text.delta"] * num_deltas, *TEXT_END, "incomplete"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 600


class Tree(pydantic.BaseModel):
    name: Literal["pine", "elm"]
    old: bool


def test_an_answer_parses(client: openai.OpenAI) -> None:
    """`.parse()` and `.stream()` send a strict schema; a random model could not fulfil it by itself."""
    asked: dict[str, Any] = {"model": "llm", "input": "hi", "text_format": Tree, "extra_body": {"seed": 5}}
    found = client.responses.parse(**asked, max_output_tokens=200)
    assert isinstance(found.output_parsed, Tree)
    assert (found.status, found.incomplete_details) == ("completed", None)
    with client.responses.stream(**asked, max_output_tokens=200) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final: ParsedResponse[Tree] = stream.get_final_response()
    assert final.output_parsed == found.output_parsed
    assert Tree.model_validate_json(texts[-1]) == found.output_parsed
    free = client.responses.create(
        model="llm", input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=300, extra_body={"seed": 2}
    )
    assert free.status == "incomplete" or isinstance(json.loads(free.output_text), dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look"}])
def test_functions_are_called_and_their_outputs_read(client: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "llm", "tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"max_output_tokens": 300, "extra_body": {"seed": 3}}
    items: list[Any] = [{"role": "user", "content": "where?"}]
    found = client.responses.create(input=items, **asked)
    (call,) = found.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, set(json.loads(call.arguments)), call.status) == ("look", {"at"}, "completed")
    assert (found.status, found.parallel_tool_calls, found.output_text) == ("completed", False, "")
    with client.responses.stream(input=items, **asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind, _ in groupby(kinds)] == [*TEXT_EVENTS[:2], *CALL_EVENTS, "completed"]
    (streamed,) = final.output
    assert isinstance(streamed, ResponseFunctionToolCall)
    assert streamed.arguments == call.arguments
    items += [*found.output, {"type": "function_call_output", "call_id": call.call_id, "output": "tall"}]
    answered = client.responses.create(model="llm", input=items, max_output_tokens=20, **GREEDY)
    made = {"id": call.call_id, "type": "function", "function": {"name": "look", "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "where?"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "tall"},
    ]
    assert answered.output_text == said(client, messages, max_tokens=20, **GREEDY)


def test_tokens_come_with_their_probability(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "llm", "input": "hi", "max_output_tokens": 5, **GREEDY}
    found = client.responses.create(**asked, include=["message.output_text.logprobs"], top_logprobs=2)
    (message,) = found.output
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 5
    assert all(token.top_logprobs[0].logprob == token.logprob for token in part.logprobs)  # greedy: the likeliest
    events = client.responses.create(**asked, top_logprobs=2, stream=True)
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.logprob for token in streamed] == [token.logprob for token in part.logprobs]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": []}, "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
        ({"tools": [LOOK], "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)
def test_wrong_fields(front: Fronted, changes: dict[str, Any], param: str) -> None:
    good = {"model": "llm", "input": "x", "max_output_tokens": 1}
    for stream in (False, True):
        answer = front.ask(PATH, good | {"stream": stream} | changes)
        assert (answer.status, answer.error["param"]) == (400, param)
    assert front.ask(PATH, good | {"store": False, "previous_response_id": None}).status == 200


def test_errors_are_those_of_the_package(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.responses.create(model="gpt-9", input="a")
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported"):
        client.responses.create(model="llm", input="a", previous_response_id="resp_0")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model="llm", input="tree " * 20_000, stream=True)
