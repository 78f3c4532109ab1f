"""`/v1/messages` by Anthropic's own package, unmodified; the answers are those of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.serve.front.asking import Fronted

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0.0, "ignore_eos": True}}
PATH = "/v1/messages"
USER: Any = [{"role": "user", "content": "hi"}]
LOOK: Any = {
    "name": "look",
    "input_schema": {
        "type": "object",
        "properties": {"at": {"enum": ["pine", "elm"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module", autouse=True)
def anthropic() -> Any:
    """Imported here: it takes longer than all other packages of clients, and one of two workers needs it."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(anthropic: Any, front: Fronted) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def chats(front: Fronted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def said(chats: openai.OpenAI, messages: Any, max_tokens: int) -> str:
    """What a chat answers."""
    found = chats.chat.completions.create(model="llm", messages=messages, max_tokens=max_tokens, **GREEDY)
    return found.choices[0].message.content or ""


def test_a_message_is_answered_as_a_chat_is(client: Any, chats: openai.OpenAI, front: Fronted) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ]
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    found = client.messages.create(model=front.model, max_tokens=30, system=system, messages=messages, **GREEDY)
    expected = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "again"},
    ]
    assert [block.text for block in found.content] == [said(chats, expected, 30)]
    assert (found.role, found.model, found.stop_reason, found.stop_sequence) == (
        "assistant",
        front.model,
        "max_tokens",
        None,
    )
    counted = client.messages.count_tokens(model=front.model, system="Be short.", messages=messages)
    usage = found.usage
    assert usage.output_tokens == 30
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_stream_adds_up_to_the_same_message(client: Any) -> None:
    asked: dict[str, Any] = {"model": "llm", "max_tokens": 600, "messages": USER, **GREEDY}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(texts) > 1
    assert "".join(texts) == whole.content[0].text == final.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 600)
    kinds = [event.type for event in client.messages.create(**asked, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_the_text_that_ended_a_message_is_named(client: Any) -> None:
    asked: dict[str, Any] = {"model": "llm", "max_tokens": 30, "messages": USER, **GREEDY}
    text = client.messages.create(**asked).content[0].text
    middle = text[10:13]
    found = client.messages.create(**asked, stop_sequences=["never here", middle])
    assert found.content[0].text == text[: text.index(middle)]
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", middle)
    with client.messages.stream(**asked, stop_sequences=[middle]) as stream:
        assert "".join(stream.text_stream) == found.content[0].text
        assert stream.get_final_message().stop_sequence == middle


class Tree(pydantic.BaseModel):
    name: Literal["pine", "elm"]
    old: bool


def test_an_answer_parses(client: Any) -> None:
    found = client.messages.parse(
        model="llm", max_tokens=200, messages=USER, output_format=Tree, extra_body={"seed": 5}
    )
    assert isinstance(found.parsed_output, Tree)
    assert found.stop_reason == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look"}])
def test_tools_are_used_and_their_results_read(client: Any, chats: openai.OpenAI, choice: Any) -> None:
    asked: dict[str, Any] = {"model": "llm", "max_tokens": 300, "messages": USER, "tools": [LOOK]}
    asked |= {"tool_choice": choice | {"disable_parallel_tool_use": True}, "extra_body": {"seed": 3}}
    found = client.messages.create(**asked)
    (call,) = found.content
    assert (call.type, call.name, set(call.input), found.stop_reason) == ("tool_use", "look", {"at"}, "tool_use")
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "input_json" in kinds  # the package's word for a piece of a call
    assert (final.content[0].input, final.stop_reason) == (call.input, "tool_use")
    both = client.messages.create(**asked, stop_sequences=["never here"])
    assert (both.content[0].input, len(both.content), both.stop_reason) == (call.input, 1, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "tall"}]}
    more: Any = [*USER, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    answered = client.messages.create(model="llm", max_tokens=20, messages=more, **GREEDY)
    made = {
        "id": call.id,
        "type": "function",
        "function": {"name": "look", "arguments": f'{{"at": "{call.input["at"]}"}}'},
    }
    expected = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call.id, "content": "tall"},
    ]
    assert answered.content[0].text == said(chats, expected, 20)
    counted = client.messages.count_tokens(model="llm", messages=USER, tools=[LOOK])
    assert counted.input_tokens == found.usage.input_tokens + found.usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}]},
            "messages.0.content.0.type",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "I am"}]}, "messages.1.role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "a", "input_schema": {"type": "string"}}]}, "tools.0.input_schema"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "run"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
    ],
)
def test_wrong_fields(front: Fronted, changes: dict[str, Any], param: str) -> None:
    good = {"model": "llm", "messages": USER, "max_tokens": 1}
    for stream in (False, True):
        answer = front.ask(PATH, good | {"stream": stream} | changes)
        assert answer.status == 400
        assert list(answer.json) == ["type", "error", "request_id"]
        assert (answer.json["type"], answer.json["error"]["type"]) == ("error", "invalid_request_error")
        assert answer.json["error"]["param"] == param
    assert front.ask(PATH, good).status == 200


def test_errors_are_those_of_the_package(anthropic: Any, client: Any, front: Fronted) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model 'gpt-9'") as missing:
        client.messages.create(model="gpt-9", max_tokens=1, messages=USER)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(model="llm", max_tokens=1, messages=[{"role": "user", "content": "tree " * 20_000}])
    answer = front.ask(PATH, {"model": "llm", "messages": [{"role": "user", "content": "x" * 2_000_000}]})
    assert (answer.status, answer.json["error"]["type"]) == (413, "request_too_large")
    assert front.ask(PATH).json["error"]["code"] == "method_not_allowed"
