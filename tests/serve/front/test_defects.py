"""What a client sees of a defect of ours: an answer of the interface's form, and no traceback."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.serve.front.scripted import ScriptedFront

TEXT = "The server failed on this request."
USER = [{"role": "user", "content": "hi"}]
STREAMS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
}


@pytest.fixture(scope="module")
def front() -> Iterator[ScriptedFront]:
    """Its model has no folder, so that its tokenizer cannot be read."""
    with ScriptedFront() as front:
        yield front


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "echo": True}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        *STREAMS.items(),
    ],
)
def test_it_is_an_error_of_the_interfaces_form(
    front: ScriptedFront, path: str, fields: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    front.script.pieces = [ValueError("secret")]
    answer = front.ask(path, fields | {"model": "m"})
    assert (answer.status, answer.headers["content-type"]) == (500, "application/json")
    assert answer.json["error"]["message"] == TEXT
    assert answer.json.get("type") == ("error" if path.startswith("/v1/messages") else None)
    (record,) = (record for record in caplog.records if record.exc_info)
    assert answer.headers["x-request-id"] in record.getMessage()


@pytest.mark.parametrize("path", STREAMS)
def test_in_a_stream_it_is_an_event(front: ScriptedFront, path: str, caplog: pytest.LogCaptureFixture) -> None:
    front.script.pieces = ["Hi", ValueError("secret"), "."]
    *_, last = front.events(path, STREAMS[path] | {"model": "m"})
    assert TEXT in json.dumps(last)
    assert "secret" not in json.dumps(last)
    (record,) = (record for record in caplog.records if record.exc_info)
    assert "failed" in record.getMessage()


def test_scores_need_nothing_of_the_models_folder(front: ScriptedFront) -> None:
    """A model goes on when its folder has been moved or deleted."""
    front.script.pieces = ["Hi"]
    answer = front.ask("/v1/completions", {"model": "m", "prompt": "x", "logprobs": 1})
    assert (answer.status, answer.json["choices"][0]["text"]) == (200, "Hi")
