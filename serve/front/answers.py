"""One request to the engine for each prompt, their chunks as they come, and what they cost."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from penjing.core.errors import OverloadedError, PenjingError, RequestError
from penjing.serve.client.wire_text import Chunk
from penjing.serve.front.backend import Backend
from penjing.serve.front.upstream import Upstream
from penjing.serve.gate.config import FrontModel
from penjing.serve.gate.errors import ApiError, failed, translated
from penjing.serve.gate.guard import Exchange, Receive, Send
from penjing.serve.sampling.params import SamplingParams

DONE = b"data: [DONE]\n\n"

log = logging.getLogger("penjing.front")


@dataclass
class Ask:
    """What one request asks of the engine: `prompts` of text or token ids, or the `messages` of one chat."""

    model: FrontModel
    sampling: dict[str, Any]
    exchange: Exchange
    prompts: Sequence[str | list[int]] = ()
    messages: list[dict[str, Any]] | None = None
    stream: bool = False
    only_prompts: bool = False
    """What is written behind them, one token at least, is not shown, and so not counted."""
    timeout: float | None = None
    tokens: dict[int, Chunk] = field(default_factory=dict)
    """The last chunk of each prompt, which knows the prompt's length."""
    thought_tokens: int | None = None
    """Of a model that thinks: of the tokens that have come, those that were thought."""

    def __post_init__(self) -> None:
        self.exchange.model = self.model.id
        account = self.exchange.account
        if account is not None:  # nobody comes before others by asking for it
            asked = max(0, self.sampling.get("priority", 0))
            self.sampling |= {"key": account.key.name, "priority": account.key.priority + asked}
        if self.model.adapter is not None:
            self.sampling = self.sampling | {"lora_name": self.model.adapter}
        checked = {name: value for name, value in self.sampling.items() if name in SamplingParams.model_fields}
        try:
            SamplingParams.from_json(checked)  # here it costs nobody else anything
        except RequestError as error:
            raise translated(error, {}) from None

    def ask_instead(self, model: FrontModel) -> None:
        """Another version answers."""
        self.model = model
        self.exchange.model = model.id

    @property
    def n(self) -> int:
        """Answers to each prompt."""
        return self.sampling.get("n", 1)

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's object, of what has come so far."""
        prompt = sum(chunk.num_input_tokens for chunk in self.tokens.values())
        cached = sum(chunk.num_cached_tokens for chunk in self.tokens.values())
        completion = self.exchange.completion_tokens
        found = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.thought_tokens is not None:
            found["completion_tokens_details"] = {"reasoning_tokens": self.thought_tokens}
        return found


async def answer(backend: Backend, ask: Ask) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(number of the prompt, chunk) as they come; closing it cancels what is left. Where the model has gone and nothing
    has come yet, another version is asked, which is `ask.model` then.

    Raises:
        ApiError: what the client shall see.
    """
    tried: set[str] = set()
    while True:
        try:
            async with aclosing(_answer(backend, ask)) as chunks:
                async for found in chunks:
                    yield found
            return
        except ApiError as error:
            tried.add(ask.model.key)
            other = backend.another(ask.exchange, tried) if error.status == 503 and not ask.tokens else None
            if other is None:
                raise
            ask.ask_instead(other)


async def _answer(backend: Backend, ask: Ask) -> AsyncGenerator[tuple[int, Chunk], None]:
    exchange, upstream = ask.exchange, backend.upstream(ask.model)
    wanted = exchange.key, ask.n * max(1, len(ask.prompts)), len(exchange.body)
    last: dict[tuple[int, int], float] = {}  # when tokens of an answer came
    try:
        upstream.fullness.check(*wanted)
        with upstream.running():
            async with aclosing(_chunks(upstream, ask)) as chunks:
                async for index, chunk in chunks:
                    now = time.monotonic()
                    if exchange.first_token is None:
                        exchange.first_token = now - exchange.started
                        if ask.stream:  # else it waits for the last one
                            backend.usage.first_token(exchange, exchange.first_token)
                    if (before := last.get((index, chunk.index))) is not None and chunk.num_tokens:
                        backend.usage.tokens(exchange, chunk.num_tokens, now - before)
                    last[index, chunk.index] = now
                    written = 0 if ask.only_prompts else chunk.num_tokens
                    exchange.count(0 if index in ask.tokens else chunk.num_input_tokens, written)
                    ask.tokens[index] = chunk
                    upstream.alive()
                    if chunk.stages is not None and chunk.index == 0:
                        exchange.stages.append((now - exchange.started, chunk.stages))
                    yield index, chunk
    except PenjingError as error:
        if isinstance(error, OverloadedError):
            upstream.fullness.note(*wanted, error)
        raise backend.error(error, upstream) from None


def _one(upstream: Upstream, ask: Ask, index: int) -> AsyncGenerator[Chunk, None]:
    prompt = None if ask.messages is not None else ask.prompts[index]
    return upstream.client.stream(
        prompt,
        messages=ask.messages,
        timeout=ask.timeout,
        whole=not ask.stream,
        request_id=ask.exchange.request_id,
        stages=ask.exchange.traced or None,
        **ask.sampling,
    )


async def _chunks(upstream: Upstream, ask: Ask) -> AsyncGenerator[tuple[int, Chunk], None]:
    if ask.messages is not None or len(ask.prompts) == 1:
        async with aclosing(_one(upstream, ask, 0)) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk | None]] = asyncio.Queue()  # what it can hold is bounded by the context

    async def pump(index: int) -> None:
        try:
            async with aclosing(_one(upstream, ask, index)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
        finally:
            queue.put_nowait((index, None))

    tasks = [asyncio.create_task(pump(index)) for index in range(len(ask.prompts))]
    unfinished = len(tasks)
    try:
        while unfinished:
            index, chunk = await queue.get()
            if chunk is not None:
                yield index, chunk
                continue
            unfinished -= 1
            await tasks[index]  # its error is ours
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Events(Response):
    """Server-sent events. What fails after the first one becomes an event."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Send them."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async with aclosing(self._rest) as rest:
                async for event in rest:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            told = in_stream(error, scope["state"]["exchange"])
            await send({"type": "http.response.body", "body": b"data: " + told.body + b"\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    @classmethod
    async def of(cls, events: AsyncGenerator[bytes, None]) -> Events:
        """The response of `events`, once the first has come: what fails before has a status of its own."""
        return cls(await anext(events), events)


def in_stream(error: Exception, exchange: Exchange) -> ApiError:
    """What a client is told of an error once its answer has begun; a defect of ours is logged."""
    if not isinstance(error, ApiError):
        log.error("request %s failed", exchange.request_id, exc_info=error)
        error = failed()
    exchange.reason = error.code or ""
    return error


def opening(head: dict[str, Any], ask: Ask) -> bytes:
    """What each event of a stream begins with, up to its choices, once it is known who answers."""
    head["model"] = ask.model.id
    return b"data: " + json.dumps(head, separators=(",", ":")).encode()[:-1] + b',"choices":['


def event(content: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
