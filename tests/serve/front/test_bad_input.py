"""What no good client sends: each gets OpenAI's error body and the right status, and the next request its answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.front.asking import Fronted

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
SCHEMA = "response_format.json_schema.schema"


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value, "strict": True}}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}}
    return value


def test_not_json(front: Fronted) -> None:
    for raw in (b"", b"{", b"[1]", b"null", b'{"model": NaN}', b"\xff\xfe", b'{"model": "llm", "prompt": "\xff"}'):
        assert front.ask(COMPLETION, raw=raw).error["code"] == "invalid_json"
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = front.ask(COMPLETION, raw=b"{}", headers={"content-type": kind})
        assert answer.status == 415
        assert kind in answer.error["message"]
        assert "curl: --json" in answer.error["message"]  # what `curl -d` sends is a form


def test_deep_and_large(front: Fronted) -> None:
    deep = b'{"model": "llm", "prompt": ' + b"[" * 120_000 + b"]" * 120_000 + b"}"
    assert front.ask(COMPLETION, raw=deep).error["code"] == "invalid_json"
    assert front.ask(COMPLETION, raw=b'{"a":' * 60_000).error["code"] == "invalid_json"
    assert front.ask(COMPLETION, raw=b'{"model": "llm", "n": ' + b"9" * 100_000 + b"}").status == 400
    assert front.ask(COMPLETION, {"model": "llm", "prompt": "x" * 5_000_000}).status == 413
    assert front.ask(COMPLETION, {"model": "llm", "prompt": "x" * 900_000}).status == 400  # more than the context


@pytest.mark.parametrize("text", ["\\u0000", "\\ud800", "a\\udc00b"])
def test_characters_that_no_text_has(front: Fronted, text: str) -> None:
    raw = f'{{"model": "llm", "prompt": "{text}"}}'.encode()
    assert front.ask(COMPLETION, raw=raw).error["code"] == "invalid_json"
    assert front.ask(COMPLETION, raw=b'{"model": "llm", "prompt": "\\\\u0000"}').status == 200  # a backslash and digits


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("path", "changes", "param"),
    [
        (COMPLETION, {"prompt": 5}, "prompt"),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": [[]]}, None),
        (COMPLETION, {"prompt": ["a", 1]}, "prompt.1"),
        (COMPLETION, {"prompt": [-1]}, "prompt.0"),
        (COMPLETION, {"prompt": [999_999]}, None),
        (COMPLETION, {"prompt": ["a"] * 1000}, "prompt"),
        (COMPLETION, {"max_tokens": "5"}, "max_tokens"),
        (COMPLETION, {"max_tokens": 0}, "max_tokens"),
        (COMPLETION, {"stream": "yes"}, "stream"),
        (COMPLETION, {"n": 0}, "n"),
        (COMPLETION, {"best_of": 4}, "best_of"),
        (COMPLETION, {"logit_bias": {"a": 1}}, "logit_bias.a"),
        (COMPLETION, {"logit_bias": {"5": 101}}, "logit_bias.5"),
        (COMPLETION, {"logit_bias": {"9999999": 1}}, "logit_bias"),
        (COMPLETION, {"top_p": 0}, "top_p"),
        (COMPLETION, {"stop": [""]}, "stop.0"),
        (COMPLETION, {"n": 1.5}, "n"),
        (COMPLETION, {"stream_options": {"usage": True}}, "stream_options.usage"),
        (COMPLETION, {"modle": "x"}, "modle"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages.0.content.0.type"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.image_url"),
        (CHAT, {"messages": [{"role": "user", "content": [image("https://example.org/a.png")]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [image("data:image/png;base64,AA==")]}]}, None),
        (CHAT, {"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages.0.mood"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, SCHEMA),
        (CHAT, {"response_format": schema({"type": "foo"})}, "guided"),
        (CHAT, {"response_format": schema({"$ref": "#/none"})}, "guided"),
        (CHAT, {"response_format": schema({"type": "string", "pattern": "(?=a)b"})}, "guided"),
        (CHAT, {"response_format": schema(nested(60))}, "guided"),
        (CHAT, {"response_format": schema({"enum": ["x" * 70_000]})}, "guided"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (CHAT, {"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"guided_regex": "["}, "guided"),
        (COMPLETION, {"guided_regex": "a", "guided_choice": ["b"]}, "guided"),
        (COMPLETION, {"guided_choice": []}, "guided"),
        (COMPLETION, {"guided_json": {"$ref": "#"}}, "guided"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"top_logprobs": 30, "logprobs": True}, "top_logprobs"),
    ],
)
def test_wrong_fields(front: Fronted, path: str, changes: dict[str, Any], param: str | None) -> None:
    good: dict[str, Any] = {"model": "llm", "max_tokens": 1}
    good |= {"prompt": "x"} if path == COMPLETION else {"messages": [{"role": "user", "content": "x"}]}
    answer = front.ask(path, good | changes)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert front.ask(path, good).status == 200


def test_null_asks_for_nothing_where_no_field_has_the_name(front: Fronted) -> None:
    """Some clients write all the fields that they know, and send messages back as another server wrote them."""
    content = [{"type": "text", "text": "x", "cache": None}]
    message = {"role": "user", "content": content, "reasoning": None}
    good: dict[str, Any] = {"model": "llm", "max_tokens": 1, "functions": None, "messages": [message]}
    assert front.ask(CHAT, good).status == 200
    assert front.ask(CHAT, good | {"functions": []}).error["param"] == "functions"
    assert front.ask(CHAT, good | {"messages": [message | {"mood": 1}]}).error["param"] == "messages.0.mood"
    assert front.ask(CHAT, good | {"messages": [{"name": None, "content": "x"}]}).error["param"] == "messages.0.role"
    assert front.ask(COMPLETION, {"model": "llm", "max_tokens": 1, "prompt": None}).error["param"] == "prompt"


def test_a_whole_number_may_have_a_point(front: Fronted) -> None:
    """JSON has one kind of number, and some languages write 2 as 2.0."""
    answer = front.ask(COMPLETION, {"model": "llm", "prompt": [5.0, 6.0], "max_tokens": 2.0, "n": 2.0})
    assert answer.status == 200
    assert answer.json["usage"]["prompt_tokens"] == 2


def test_a_missing_field(front: Fronted) -> None:
    assert front.ask(COMPLETION, {"model": "llm"}).error["code"] == "missing_field"
    assert front.ask(COMPLETION, {"prompt": "x"}).error["param"] == "model"
