"""`/openapi.json` of the front's application, without a server: jsonschema reads it and judges bodies by it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penjing.serve.access.keys import add_key
from penjing.serve.gate.body import read_body
from penjing.serve.gate.config import FrontConfig, FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.site.app import POSTS, Front

MESSAGES = [{"role": "user", "content": "a"}]


def front_job(folder: Path, **config: Any) -> FrontJob:
    return FrontJob(
        front=FrontConfig(port=8080, **config),
        models=(FrontModel(id="a", kind="llm", name="llm", folder=folder, grpc="127.0.0.1:1", metrics="127.0.0.1:2"),),
        log=folder / "log",
    )


def get(front: Front, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    """Ask the application itself, as a server would."""
    found: list[Any] = []
    sent = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]

    async def send(message: Any) -> None:
        found.append(message)

    async def ask() -> None:
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()

        scope = {"type": "http", "method": "GET", "path": path, "headers": sent}
        await front.application(scope | {"root_path": "", "query_string": b""}, receive, send)

    asyncio.run(ask())
    return found[0]["status"], json.loads(b"".join(message.get("body", b"") for message in found))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Front:
    return Front(front_job(tmp_path_factory.mktemp("front")))


@pytest.fixture(scope="module")
def document(front: Front) -> dict[str, Any]:
    status, found = get(front, "/openapi.json")
    assert status == 200
    return found


def test_every_path_is_in_it(front: Front, document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    assert document["info"]["version"]
    assert {"/openapi.json", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/models/{name}"} < set(
        document["paths"]
    )
    for path, operations in document["paths"].items():
        ((method, operation),) = operations.items()
        assert set(operation["responses"]) >= {"200", "4XX"}
        assert ("requestBody" in operation) == (method == "post")
        named = [given["name"] for given in operation.get("parameters", []) if given["required"]]
        assert named == re.findall(r"{(\w+)}", path)
        if method == "post":
            assert get(front, path)[0] == 405
    assert get(front, "/nothing")[0] == 404
    assert "security" not in document


def test_schemas_are_json_schemas_and_references_lead_somewhere(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    references = re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document))
    assert references
    for reference in references:
        place: Any = document
        for part in reference.split("/"):
            place = place[part]


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("/v1/completions", {"prompt": [[1, 2]], "stop": "a"}, {"prompt": 5}),
        ("/v1/completions", {"prompt": "a", "stream_options": {"include_usage": True}}, {"prompt": "a", "promt": "b"}),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "auto"}, {"messages": []}),
        (
            "/v1/chat/completions",
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
            },
            {"messages": [{"role": "king", "content": "a"}]},
        ),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "text"}}}, {"input": []}),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "a"},
                    {"type": "function_call_output", "call_id": "1", "output": "b"},
                ]
            },
            {"input": [{"type": "function_call_output", "output": "b"}]},
        ),
        ("/v1/responses", {"input": "a", "background": False}, {"input": "a", "background": 0}),
        ("/v1/responses", {"input": "a", "background": None}, {"input": "a", "background": True}),
        ("/v1/completions", {"prompt": "a", "functions": None}, {"prompt": "a", "functions": []}),
        (
            "/v1/chat/completions",
            {"messages": [MESSAGES[0] | {"mood": None}]},
            {"messages": [MESSAGES[0] | {"mood": 1}]},
        ),
        ("/v1/responses", {"input": "a", "moods": None}, {"input": "a", "moods": {}}),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 1, "mood": None},
            {"messages": MESSAGES, "max_tokens": 1, "mood": 0},
        ),
        ("/v1/completions", {"prompt": "a", "n": 1.0, "stop": ["a"]}, {"prompt": "a", "n": 65}),
        ("/v1/completions", {"prompt": [1.0], "top_p": 1}, {"prompt": "a", "top_p": 0}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"5": -100}}, {"prompt": "a", "logit_bias": {"a": 1}}),
        ("/v1/completions", {"prompt": "a", "logprobs": 20}, {"prompt": "a", "logprobs": 21}),
        ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 0}, {"messages": MESSAGES, "temperature": -1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "stop": None}, {"messages": MESSAGES, "stop": [""]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "system": "a"}, {"messages": MESSAGES}),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        ),
        ("/v1/embeddings", {"input": ["a"], "encoding_format": "base64"}, {"input": "a", "encoding_format": "int8"}),
        ("/tokenize", {"prompt": "a"}, {}),
        ("/detokenize", {"tokens": [1]}, {"tokens": [-1]}),
    ],
)
def test_bodies_are_judged_as_the_front_does(
    document: dict[str, Any], path: str, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    judge = Draft202012Validator(schema | {"components": document["components"]})
    judge.validate({"model": "a"} | good)
    assert not judge.is_valid({"model": "a"} | bad)
    assert not judge.is_valid([])
    kind = {found.path: found.body for found in POSTS}[path]
    assert kind is not None
    read_body(kind, "application/json", json.dumps({"model": "a"} | good).encode())
    with pytest.raises(ApiError):
        read_body(kind, "application/json", json.dumps({"model": "a"} | bad).encode())


def test_a_stream_has_no_schema_that_its_events_would_be_held_to(document: dict[str, Any]) -> None:
    """Schemathesis took `{"type": "string"}` for the schema of each event, which is an object to it."""
    answer = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]
    assert answer == {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}


def test_errors_are_as_described(front: Front, document: dict[str, Any]) -> None:
    status, content = get(front, "/v1/nothing")
    assert status == 404
    schema = document["paths"]["/v1/models"]["get"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    judge = Draft202012Validator(schema | {"components": document["components"]})
    judge.validate(content)
    assert not judge.is_valid({"error": "text"})


def test_errors_of_messages_are_anthropics(front: Front, document: dict[str, Any]) -> None:
    status, content = get(front, "/v1/messages/nothing")
    assert (status, content["error"]["type"]) == (404, "not_found_error")
    schema = document["paths"]["/v1/messages"]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    judge = Draft202012Validator(schema | {"components": document["components"]})
    judge.validate(content)
    assert not judge.is_valid({"error": content["error"]})


def test_keys_are_in_it_where_they_are_asked_for(tmp_path: Path) -> None:
    secret = add_key(tmp_path / "keys.toml", "a", {})
    front = Front(front_job(tmp_path, keys=tmp_path / "keys.toml"))
    assert get(front, "/openapi.json")[0] == 401
    status, found = get(front, "/openapi.json", authorization=f"Bearer {secret}")
    assert status == 200
    assert found["security"] == [{"bearer": []}, {"header": []}]
    assert set(found["components"]["securitySchemes"]) == {"bearer", "header"}
    assert found["paths"]["/health/live"]["get"]["security"] == []
