"""What bodies ask of the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penjing.serve.front.bodies import Body, ChatBody, CompletionBody, Generation
from penjing.serve.front.embeddings import EmbeddingBody
from penjing.serve.gate.body import read_body
from penjing.serve.gate.errors import ApiError
from penjing.serve.sampling.guided import Guided


def body_with(*names: str, **values: Any) -> ChatBody:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return ChatBody.model_validate(
        {"model": "a", "messages": [{"role": "user", "content": "a"}], "tools": tools} | values
    )


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("name", ["auto", "required", "none", "run"])
def test_a_tool_that_is_not_offered_cannot_be_chosen_whatever_its_name(name: str) -> None:
    with pytest.raises(ApiError, match=f"no tool '{name}'") as caught:
        body_with("look", tool_choice=named(name)).guided()
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["auto", "required", "none", "run"])
def test_a_tool_that_is_chosen_is_called_once_whatever_its_name(name: str) -> None:
    found = body_with("look", name, tool_choice=named(name)).guided()
    assert found is not None
    assert found["value"] == {"tools": [named(name)], "choice": "required", "parallel": False}
    Guided.model_validate(found)


def test_without_a_choice_the_model_calls_what_it_likes() -> None:
    for choice in ("auto", None):
        found = body_with("look", "run", tool_choice=choice).guided()
        assert found is not None
        assert (found["value"]["choice"], found["value"]["parallel"]) == ("auto", True)
        assert [tool["function"]["name"] for tool in found["value"]["tools"]] == ["look", "run"]


MARK = {"type": "ephemeral"}
IGNORED: dict[str, Any] = {
    "metadata": {"session": "a", "tags": ["b", "c"], "turn": 3},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "a",
    "prompt_cache_key": "a",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
}
"""What the openai package knows and LangChain, LiteLLM, LlamaIndex, Vercel's AI SDK and agents send: none of it changes
what an answer says."""


def asked(kind: type[Body], values: dict[str, Any]) -> Body:
    good = {ChatBody: {"messages": [{"role": "user", "content": "a"}]}, CompletionBody: {"prompt": "a"}}
    body = {"model": "a"} | good.get(kind, {"input": "a"}) | values
    return read_body(kind, "application/json", json.dumps(body).encode())


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, EmbeddingBody])
@pytest.mark.parametrize("name", IGNORED)
def test_what_changes_no_answer_is_taken_and_not_used(kind: type[Body], name: str) -> None:
    found = asked(kind, {name: IGNORED[name]})
    if isinstance(found, Generation):
        assert found.sampling() == {}
    assert kind.model_fields[name].description in ("Is not used.", "Is not done.", "Is not used: prompts are cached.")


@pytest.mark.parametrize(
    "values",
    [
        {"modalities": ["text"]},
        {"verbosity": "medium"},
        {"prediction": {"type": "content", "content": "what it may say"}},
        {"reasoning_effort": "max"},
    ],
)
def test_a_chat_may_ask_for_what_it_gets_anyway(values: dict[str, Any]) -> None:
    assert isinstance(body := asked(ChatBody, values), ChatBody)
    assert body.sampling() == {}


@pytest.mark.parametrize(
    "values",
    [
        {"modalities": ["text", "audio"]},
        {"verbosity": "low"},
        {"audio": {"voice": "a", "format": "wav"}},
        {"web_search_options": {}},
        {"functions": [{"name": "a"}]},
        {"function_call": "auto"},
        {"moderation": {"model": "a"}},
        {"length_penalty": 2.0},
    ],
)
def test_what_would_change_the_answer_and_is_not_done_is_refused_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ApiError, match=name):
        asked(ChatBody, values)


def test_marks_of_caches_do_not_reach_the_template() -> None:
    """LiteLLM keeps Anthropic's marks for addresses of its user, and the openai package has its own."""
    parts = [{"type": "text", "text": "a", "cache_control": MARK, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    tool = {"type": "function", "function": {"name": "look"}}
    found = asked(
        ChatBody,
        {
            "messages": [{"role": "user", "content": parts, "cache_control": MARK}],
            "tools": [tool | {"cache_control": MARK}],
        },
    )
    assert isinstance(found, ChatBody)
    assert [message.rendered() for message in found.messages] == [{"role": "user", "content": "a"}]
    assert found.variables()["tools"] == [tool]
    assert found.guided() == body_with("look").guided()


def test_an_answer_comes_back_as_other_programs_keep_it() -> None:
    """LiteLLM's messages have fields of their own, and newer vLLM calls a thought `reasoning`."""
    answer = {"role": "assistant", "content": "b", "provider_specific_fields": {"refusal": None}}
    thought = [{"type": "thinking", "thinking": "hm"}]
    for values in (
        {"reasoning": "hm"},
        {"reasoning_content": "hm", "thinking_blocks": thought},
        {"reasoning_content": "hm", "reasoning": "hm"},
    ):
        found = asked(ChatBody, {"messages": [{"role": "user", "content": "a"}, answer | values]})
        assert isinstance(found, ChatBody)
        said = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
        assert found.messages[1].rendered() == said
