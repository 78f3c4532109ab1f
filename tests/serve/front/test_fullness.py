"""A front that has just been told that the model is full tells it to others, for a moment and only where it is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penjing.core.errors import OverloadedError
from penjing.serve.client.wire_text import Chunk
from penjing.serve.front.answers import Ask, answer
from penjing.serve.front.backend import Backend
from penjing.serve.front.fullness import MAX_KEYS, MEMORY_SECONDS, Fullness
from penjing.serve.front.upstream import FRESH_SECONDS
from penjing.serve.gate.config import FrontConfig, FrontJob, FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange

FULL = OverloadedError("the engine is overloaded: 8 sequences wait and max_waiting_requests=8; retry in 3 s", 3.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def is_refused(fullness: Fullness, *wanted: Any) -> bool:
    try:
        fullness.check(*wanted)
    except OverloadedError:
        return True
    return False


def test_a_refusal_holds_for_a_moment_for_those_that_ask_for_as_much() -> None:
    clock = Clock()
    fullness = Fullness(clock)
    assert not is_refused(fullness, "", 1, 100)
    fullness.note("", 4, 100, FULL)
    assert is_refused(fullness, "", 4, 100)
    assert is_refused(fullness, "", 5, 1000)
    assert not is_refused(fullness, "", 1, 100), "one answer may have a place where four have none"
    assert not is_refused(fullness, "", 4, 99), "a shorter prompt may be let in where tokens are what is bounded"
    assert not is_refused(fullness, "alice", 4, 100), "places of another key"
    clock.now = MEMORY_SECONDS / 2
    fullness.note("", 1, 50, FULL)
    assert is_refused(fullness, "", 1, 50)
    clock.now = MEMORY_SECONDS
    assert not is_refused(fullness, "", 4, 100), "the first refusal is what a moment is counted from"


def test_a_time_that_is_up_says_nothing_about_others() -> None:
    fullness = Fullness(Clock())
    fullness.note("", 1, 1, OverloadedError("the request's timeout passed before the answer was complete"))
    assert not is_refused(fullness, "", 1, 1)


def test_keys_that_are_over_are_forgotten() -> None:
    clock = Clock()
    fullness = Fullness(clock)
    for number in range(3 * MAX_KEYS):
        clock.now += MEMORY_SECONDS / 100
        fullness.note(str(number), 1, 1, FULL)
    assert len(fullness._found) <= MAX_KEYS + 1


class FakeClient:
    """Has no place for the first request, and answers the others."""

    def __init__(self) -> None:
        self.asked = 0

    async def stream(self, *_: Any, **__: Any) -> AsyncGenerator[Chunk, None]:
        self.asked += 1
        if self.asked == 1:
            raise FULL
        for _number in range(3):
            yield Chunk("a", num_tokens=1, num_input_tokens=1)

    async def close(self) -> None:
        pass


def test_the_model_is_not_asked_again_at_once_and_each_token_shows_that_it_lives() -> None:
    async def check() -> None:
        model = FrontModel(id="llm", name="llm", kind="decoder", grpc="h:1", metrics="h:2", folder=Path("llm"))
        backend = Backend(FrontJob(front=FrontConfig(port=8080), models=(model,), log=Path("log")))
        upstream, client, clock = backend.upstream(model), FakeClient(), Clock()
        await upstream.client.close()
        upstream.client, upstream.fullness = client, Fullness(clock)  # type: ignore[assignment]

        def ask() -> Any:
            return answer(backend, Ask(model, {"max_tokens": 3}, Exchange("r", body=b"{}"), ["a"], stream=True))

        for _ in range(3):
            with pytest.raises(ApiError) as caught:
                await anext(ask())
            assert (caught.value.status, caught.value.headers["retry-after"]) == (429, "3")
        assert client.asked == 1
        clock.now = 1.0
        chunks = ask()
        await anext(chunks)
        assert client.asked == 2
        upstream._answered -= 2 * FRESH_SECONDS
        assert not upstream.is_ready
        await anext(chunks)
        assert upstream.is_ready, "a long answer that goes on is a sign of life"
        await chunks.aclose()

    asyncio.run(check())
