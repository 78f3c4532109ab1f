"""OpenAI's own package, unmodified, against the front; the answers are those of gRPC."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from penjing.serve.client.client import Client
from penjing.serve.front.fullness import MEMORY_SECONDS
from tests.serve.front.asking import Fronted
from tests.serve.triton.serving import wait_until

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
PROMPT = "the bonsai"
GREEDY: dict[str, Any] = {"temperature": 0.0, "extra_body": {"ignore_eos": True}}
CHAT: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(front: Fronted) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def grpc(front: Fronted) -> Iterator[Client]:
    with front.served.client() as made:
        yield made


def test_models(client: openai.OpenAI, front: Fronted) -> None:
    assert [model.id for model in client.models.list()] == [front.model]
    assert client.models.retrieve(front.model).owned_by == "penjing"


def test_a_completion_is_that_of_grpc(client: openai.OpenAI, grpc: Client, front: Fronted) -> None:
    expected = grpc.generate(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
    found = client.completions.create(model=front.model, prompt=PROMPT, max_tokens=40, **GREEDY)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (expected.num_input_tokens, 40)
    again = client.completions.create(model="llm", prompt=PROMPT, **GREEDY)
    assert again.choices[0].text == grpc.generate(PROMPT, max_tokens=16, temperature=0.0, ignore_eos=True).text


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, front: Fronted) -> None:
    whole = client.completions.create(model=front.model, prompt=PROMPT, max_tokens=600, **GREEDY)
    stream = client.completions.create(
        model=front.model, prompt=PROMPT, max_tokens=600, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    events = list(stream)
    assert len(events) > 2  # what comes within 20 ms is joined: two pieces and the usage
    assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    assert [event.choices[0].finish_reason for event in events if event.choices][-1] == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 600
    assert events[-1].choices == []
    assert {event.id for event in events} == {events[0].id}


def test_prompts_of_every_form(client: openai.OpenAI, grpc: Client, front: Fronted) -> None:
    prompts = [f"tree {number}" for number in range(5)]
    alone = [grpc.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True).text for prompt in prompts]
    found = client.completions.create(model=front.model, prompt=prompts, max_tokens=8, **GREEDY)
    assert [choice.text for choice in found.choices] == alone
    assert [choice.index for choice in found.choices] == list(range(5))
    streamed = [""] * 5
    for event in client.completions.create(model=front.model, prompt=prompts, max_tokens=8, stream=True, **GREEDY):
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == alone
    ids = [ask["tokens"] for ask in (front.ask("/tokenize", {"prompt": prompt}).json for prompt in prompts)]
    assert [
        choice.text
        for choice in client.completions.create(model=front.model, prompt=ids, max_tokens=8, **GREEDY).choices
    ] == alone
    one = client.completions.create(model=front.model, prompt=ids[0], max_tokens=8, echo=True, **GREEDY)
    assert one.choices[0].text == prompts[0] + alone[0]


def test_several_answers_with_a_seed(client: openai.OpenAI, grpc: Client, front: Fronted) -> None:
    expected = grpc.generate(PROMPT, n=3, max_tokens=6, temperature=1.0, seed=7, ignore_eos=True).choices
    asked: dict[str, Any] = {"n": 3, "max_tokens": 6, "seed": 7, "extra_body": {"ignore_eos": True}}
    found = client.completions.create(model=front.model, prompt=PROMPT, **asked)
    assert tuple(choice.text for choice in found.choices) == expected
    assert found.usage is not None
    assert found.usage.completion_tokens == 18
    two = client.completions.create(model=front.model, prompt=[PROMPT, "other"], **asked)
    assert tuple(choice.text for choice in two.choices[:3]) == expected
    assert [choice.index for choice in two.choices] == list(range(6))


def test_scores_of_prompt_and_answer(client: openai.OpenAI, grpc: Client, front: Fronted) -> None:
    expected = grpc.generate(PROMPT, max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    for stream in (False, True):
        answer = client.completions.create(
            model=front.model, prompt=PROMPT, max_tokens=3, echo=True, logprobs=2, stream=stream, **GREEDY
        )
        choices = [event.choices[0] for event in answer] if stream else [answer.choices[0]]  # type: ignore[union-attr]
        lists = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for each in lists for token in each.tokens or []]
        values = [value for each in lists for value in each.token_logprobs or []]
        offsets = [offset for each in lists for offset in each.text_offset or []]
        text = "".join(choice.text for choice in choices)
        assert "".join(tokens) == text == PROMPT + expected.text
        assert [text[a:b] for a, b in zip(offsets, [*offsets[1:], None], strict=True)] == tokens
        entries = [*(expected.prompt_logprobs or []), *expected.logprobs]
        assert values == [None if entry is None else next(iter(entry.values()))["logprob"] for entry in entries]
    only = client.completions.create(model=front.model, prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert only.choices[0].text == PROMPT
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs == values[:-3]
    assert only.usage is not None
    assert (only.usage.completion_tokens, only.usage.total_tokens) == (0, only.usage.prompt_tokens)


@pytest.mark.parametrize("prompt", ["é", "naïve 你好 😀 a<|im_end|>b 😀😀", [200, 201, 40]])
def test_tokens_within_a_character_begin_where_it_does(
    client: openai.OpenAI, front: Fronted, prompt: str | list[int]
) -> None:
    asked: dict[str, Any] = {"model": front.model, "prompt": prompt, "max_tokens": 12, "seed": 1}
    for echo in (True, False):
        whole = client.completions.create(**asked, echo=echo, logprobs=0).choices[0]
        events = client.completions.create(**asked, echo=echo, logprobs=0, stream=True)
        streamed = [event.choices[0].logprobs for event in events]
        assert whole.logprobs is not None
        tokens, offsets = whole.logprobs.tokens or [], whole.logprobs.text_offset or []
        assert [at for each in streamed if each is not None for at in each.text_offset or []] == offsets
        assert offsets == sorted(offsets)
        for token, at in zip(tokens, offsets, strict=True):
            assert "\ufffd" in token or at >= len(whole.text) or whole.text[at:].startswith(token)
        if echo and isinstance(prompt, str):
            assert any("\ufffd" in token for token in tokens)


def test_a_chat_whole_and_streamed(client: openai.OpenAI, grpc: Client, front: Fronted) -> None:
    expected = grpc.generate(messages=CHAT, max_tokens=30, temperature=0.0, ignore_eos=True)
    found = client.chat.completions.create(model=front.model, messages=CHAT, max_tokens=30, **GREEDY)
    assert (found.choices[0].message.content, found.choices[0].message.role) == (expected.text, "assistant")
    parts: Any = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    events = list(
        client.chat.completions.create(
            model=front.model,
            messages=parts,
            max_completion_tokens=30,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            top_logprobs=2,
            **GREEDY,
        )
    )
    for index in (0, 1):
        own = [event.choices[0] for event in events if event.choices and event.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == expected.text
        assert own[-1].finish_reason == "length"
        scored = [token for choice in own if choice.logprobs for token in choice.logprobs.content or []]
        assert len(scored) == 30
        assert all(token.top_logprobs[0].logprob == token.logprob for token in scored)  # greedy: the likeliest
        assert all(len(token.top_logprobs) == 2 for token in scored)
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.num_input_tokens, 60)


def test_cached_tokens_are_counted(client: openai.OpenAI, front: Fronted) -> None:
    long = "a row of trees " * 40
    client.completions.create(model=front.model, prompt=long, max_tokens=1)
    usage = client.completions.create(model=front.model, prompt=long, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens


def test_stop_strings(client: openai.OpenAI, grpc: Client, front: Fronted) -> None:
    text = grpc.generate(PROMPT, max_tokens=30, temperature=0.0, ignore_eos=True).text
    middle = text[10:13]
    found = client.completions.create(model=front.model, prompt=PROMPT, max_tokens=30, stop=middle, **GREEDY).choices[0]
    assert (found.text, found.finish_reason) == (text[: text.index(middle)], "stop")


def test_errors_are_those_of_the_package(client: openai.OpenAI, front: Fronted) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(
        openai.BadRequestError, match="temperature: input should be greater than or equal to 0, not -1"
    ) as caught:
        client.completions.create(model=front.model, prompt="x", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="leave room for an answer"):
        client.completions.create(model=front.model, prompt="x" * 9000)
    with pytest.raises(openai.BadRequestError, match="There is no field 'depth'"):
        client.completions.create(model=front.model, prompt="x", extra_body={"depth": 1})


def test_many_at_once_from_asyncio(front: Fronted, grpc: Client) -> None:
    alone = {f"t{i}": grpc.generate(f"t{i}", max_tokens=20, temperature=0.0, ignore_eos=True).text for i in range(12)}

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="llm", prompt=prompt, max_tokens=20, stream=True, **GREEDY)
        return "".join([event.choices[0].text async for event in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=5) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in alone))

    assert asyncio.run(all_of_them()) == list(alone.values())


def test_a_client_that_leaves_is_cancelled_streaming_or_not(client: openai.OpenAI, front: Fronted) -> None:
    served = front.served
    before = served.metrics()
    for stream in (True, False):
        asked = {"model": "llm", "prompt": "go", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
        body = json.dumps(asked | {"stream": stream}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        front.leave(head + b"content-length: %d\r\n\r\n" % len(body) + body, seconds=0.2)
    aborted = 'request_success{finished_reason="abort"}'
    wait_until(lambda: served.shown_metrics()[aborted] == before[aborted] + 2, 10, "the end of both requests")


def test_overload_is_told_with_a_time(front: Fronted, client: openai.OpenAI) -> None:
    async def ask(client: openai.AsyncOpenAI) -> tuple[int, str]:
        try:
            await client.completions.create(model="llm", prompt="x", max_tokens=400, **GREEDY)
        except openai.RateLimitError as error:
            return error.status_code, error.response.headers["retry-after"]
        return 200, ""

    async def all_of_them() -> list[tuple[int, str]]:
        async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client) for _ in range(40)))

    found = asyncio.run(all_of_them())
    assert set(found) == {(200, ""), (429, "1")}
    time.sleep(MEMORY_SECONDS)  # on a fast machine all answers end before the front has forgotten that it was full


class Tree(pydantic.BaseModel):
    name: Literal["pine", "elm"]
    old: bool


def test_an_answer_parses(client: openai.OpenAI, front: Fronted) -> None:
    """`.parse()` sends a strict schema; a random model could not fulfil it by itself."""
    for seed in range(3):
        found = client.chat.completions.parse(
            model=front.model, messages=CHAT, response_format=Tree, seed=seed, max_tokens=200
        )
        assert isinstance(found.choices[0].message.parsed, Tree)
        assert found.choices[0].finish_reason == "stop"
    forms: list[tuple[dict[str, Any], str]] = [
        ({"guided_choice": ["pine", "elm"]}, "pine|elm"),
        ({"guided_regex": "[a-c]{3}"}, "[a-c]{3}"),
    ]
    for form, pattern in forms:
        text = client.completions.create(model="llm", prompt=PROMPT, extra_body=form).choices[0].text
        assert re.fullmatch(pattern, text)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"enum": ["pine", "elm"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_tools_are_called(client: openai.OpenAI, front: Fronted, choice: Any) -> None:
    asked: dict[str, Any] = {"model": front.model, "messages": CHAT, "tools": [TOOL], "tool_choice": choice, "seed": 3}
    asked |= {"parallel_tool_calls": False, "max_tokens": 300}
    found = client.chat.completions.create(**asked).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.tool_calls is not None
    (call,) = found.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, set(json.loads(call.function.arguments))) == ("look", {"at"})
    deltas = [event.choices[0] for event in client.chat.completions.create(**asked, stream=True)]
    streamed = [call for delta in deltas for call in delta.delta.tool_calls or []]
    assert [(each.index, each.type, each.function and each.function.name) for each in streamed if each.id] == [
        (0, "function", "look")
    ]
    assert "".join(each.function.arguments or "" for each in streamed if each.function) == call.function.arguments
    with client.chat.completions.stream(**asked) as events:  # the package's own way to put the pieces together
        named = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        (whole,) = events.get_final_completion().choices[0].message.tool_calls or []
    assert [(event.name, event.arguments) for event in named] == [("look", call.function.arguments)]
    assert (whole.function.name, whole.function.arguments) == ("look", call.function.arguments)
    assert deltas[-1].finish_reason == "tool_calls"
    answered: list[Any] = [
        *CHAT,
        found.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "tall"},
    ]
    assert client.chat.completions.create(model=front.model, messages=answered, max_tokens=3).choices
