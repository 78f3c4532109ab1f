"""Wrong bodies of each interface: the error names the field and the rule in the client's words, not in pydantic's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penjing.serve.dialects.message_body import MessageBody
from penjing.serve.dialects.response_body import ResponseBody
from penjing.serve.front.bodies import Body, ChatBody, CompletionBody
from penjing.serve.front.embeddings import EmbeddingBody
from penjing.serve.gate.body import read_body
from penjing.serve.gate.errors import ApiError

GOOD: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
    ResponseBody: {"input": "a"},
    MessageBody: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    EmbeddingBody: {"input": "a"},
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
NAMES = "should be 'none', 'auto' or 'required'"


def error_of(kind: type[Body], changes: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_body(kind, "application/json", json.dumps({"model": "a"} | GOOD[kind] | changes).encode())
    return caught.value


def of_user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("kind", "changes", "param", "says"),
    [
        (CompletionBody, {"stop": ""}, "stop", 'at least 1 character, not ""'),
        (CompletionBody, {"stop": 5}, "stop", "valid string, not 5"),
        (CompletionBody, {"stop": ["a", 5]}, "stop.1", "valid string, not 5"),
        (CompletionBody, {"stop": ["a"] * 65}, "stop", 'at most 64 items, not ["a", "a"'),
        (CompletionBody, {"stop": ["a", ""]}, "stop.1", "at least 1 character"),
        (CompletionBody, {"prompt": 5}, "prompt", "valid string, not 5"),
        (CompletionBody, {"prompt": [1, -5]}, "prompt.1", "greater than or equal to 0, not -5"),
        (CompletionBody, {"prompt": [1, 2.5]}, "prompt.1", "integer, not 2.5"),
        (CompletionBody, {"prompt": [1, "a"]}, "prompt.1", 'integer, not "a"'),
        (CompletionBody, {"prompt": ["a", 1]}, "prompt.1", "string, not 1"),
        (CompletionBody, {"prompt": [[1], [2, -5]]}, "prompt.1.1", "greater than or equal to 0, not -5"),
        (CompletionBody, {"prompt": [[1], 2]}, "prompt.1", "valid list, not 2"),
        (CompletionBody, {"logit_bias": {"a": 1}}, "logit_bias.a", "pattern"),
        (CompletionBody, {"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        (CompletionBody, {"[key]": {"a": 1}}, "[key]", "no field"),
        (CompletionBody, {"stream_options": {"usage": True}}, "stream_options.usage", "no field"),
        (ChatBody, {"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        (ChatBody, {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "missing"),
        (ChatBody, {"tool_choice": {"type": "f", "function": {"name": "a"}}}, "tool_choice.type", "'function'"),
        (
            ChatBody,
            {"response_format": {"type": "json_schema"}},
            "response_format",
            "response_format: the type json_sch",
        ),
        (ChatBody, of_user({"type": "audio"}), "messages.0.content.0.type", "'text', 'image_url', not \"audio\"."),
        (ChatBody, {"messages": [{"role": "user", "audio": {}}]}, "messages.0.audio", "should be null, not {}"),
        (
            MessageBody,
            {"tools": [{"name": "a", "input_schema": {}}]},
            "tools.0.input_schema",
            'schema: it needs "type"',
        ),
        (ResponseBody, {"prompt": {"id": "p"}}, "prompt", "should be null, not {"),
        (
            ResponseBody,
            {"text": {"format": {"type": "json_schema"}}},
            "text.format",
            "text.format: the type json_schema",
        ),
        (ResponseBody, {"background": True}, "background", "background: nothing is done"),
        (ChatBody, {"tool_choice": "must"}, "tool_choice", NAMES),
        (ChatBody, {"tool_choice": 5}, "tool_choice", NAMES),
        (ChatBody, {"messages": []}, "messages", "at least 1 item, not []"),
        (ChatBody, of_user({"type": "text", "text": 5}), "messages.0.content.0.text", "valid string, not 5"),
        (ChatBody, of_user({"type": "text", "text": "a", "b": 1}), "messages.0.content.0.b", "no field"),
        (ChatBody, of_user(IMAGE, IMAGE | {"b": 1}), "messages.0.content.1.b", "no field"),
        (ChatBody, of_user({"type": "image_url"}), "messages.0.content.0.image_url", "missing"),
        (ChatBody, of_user({"type": "image_url", "image_url": {}}), "messages.0.content.0.image_url.url", "missing"),
        (ChatBody, of_user({"type": "image_url", "image_url": "b"}), "messages.0.content.0.image_url", 'not "b"'),
        (ChatBody, of_user({"type": "video"}), "messages.0.content.0.type", "'image_url'"),
        (ResponseBody, {"input": []}, "input", "at least 1 item, not []"),
        (ResponseBody, {"input": [{"role": "user"}]}, "input.0.content", "missing"),
        (ResponseBody, {"input": [{"role": "king", "content": "a"}]}, "input.0.role", "'user'"),
        (ResponseBody, {"input": [{"type": "message", "role": "user", "content": 5}]}, "input.0.content", "not 5"),
        (ResponseBody, {"tool_choice": {"type": "f", "name": "a"}}, "tool_choice.type", "should be 'function'"),
        (ResponseBody, {"tool_choice": {"type": "function", "name": 5}}, "tool_choice.name", "string, not 5"),
        (ResponseBody, {"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        (ResponseBody, {"background": True}, "background", "in the background"),
        (MessageBody, of_user({"type": "image", "source": {}}), "messages.0.content.0.source.type", "missing"),
        (MessageBody, of_user({"type": "tool_result"}), "messages.0.content.0.tool_use_id", "missing"),
        (MessageBody, {"stop_sequences": ["a", ""]}, "stop_sequences.1", "at least 1 character"),
        (MessageBody, {"stop_sequences": ["a"] * 65}, "stop_sequences", "at most 64 items"),
        (EmbeddingBody, {"input": 5}, "input", "valid string, not 5"),
        (EmbeddingBody, {"input": ["a", 5]}, "input.1", "valid string, not 5"),
        (EmbeddingBody, {"input": {"text": "a"}}, "input.type", "missing"),
        (EmbeddingBody, {"input": {"type": "text"}}, "input.text", "missing"),
        (EmbeddingBody, {"input": ["a", {"type": "image_url"}]}, "input.1.image_url", "missing"),
        (EmbeddingBody, {"input": [1, -2]}, "input.1", "greater than or equal to 0"),
        (EmbeddingBody, {"input": [[1], "a"]}, "input.1", "valid list"),
    ],
)
def test_a_field_is_named_as_the_client_wrote_it(
    kind: type[Body], changes: dict[str, Any], param: str, says: str
) -> None:
    error = error_of(kind, changes)
    assert (error.status, error.param) == (400, param)
    assert says in error.message
    assert param in error.message


def test_the_first_wrong_field_is_told() -> None:
    messages = [{"role": "king", "content": "a"}, {"role": "user", "content": [{"type": "text"}]}]
    assert error_of(ChatBody, {"messages": messages}).param == "messages.0.role"


def test_a_byte_order_mark_is_passed_over_and_other_encodings_are_told() -> None:
    body = json.dumps({"model": "a", "prompt": "é"}, ensure_ascii=False)
    read = [read_body(CompletionBody, "application/json", body.encode(name)) for name in ("utf-8", "utf-8-sig")]
    assert read[0] == read[1]
    with pytest.raises(ApiError, match="The body is UTF-16; send JSON as UTF-8") as caught:
        read_body(CompletionBody, "application/json", body.encode("utf-16"))
    assert caught.value.code == "invalid_json"
