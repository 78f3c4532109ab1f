"""An answer of the engine in another interface's words: its events as they come, and the object that they add up to."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response

from penjing.serve.front.answers import Ask, Events, answer, in_stream
from penjing.serve.front.backend import Backend
from penjing.serve.front.logprobs import Entry
from penjing.serve.front.reading import Reading
from penjing.serve.front.thoughts import behind_thought
from penjing.serve.front.tools import Part
from penjing.serve.gate.errors import ApiError


@dataclass
class Said:
    """What is new: a thought, text to show or a call of a tool, and at the end why it ends. A call has an `id` where it
    begins; what comes later of its arguments has none. It is complete when the next thing comes."""

    part: Part
    logprobs: Sequence[Entry]
    reason: str | None
    is_cut: bool = False
    """At the end: the last call has only the beginning of its arguments."""
    thought: str = ""
    """Comes alone, before everything that is said."""


class Writer(ABC):
    """One answer. Streamed or not, the same pieces go through it, so that both are the same answer."""

    @abstractmethod
    def push(self, said: Said) -> list[dict[str, Any]]:
        """The events of what is new; each names its `type`."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """The events of a failure after the first piece."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer so far."""


async def respond(
    backend: Backend, ask: Ask, writer: Writer, reading: Reading, *, shown: Callable[[str], str] | None = None
) -> Response:
    """Answer with what `writer` makes of it.

    Args:
        reading: of the answer.
        shown: what to show of the last text, where an answer that has met an end shows more than it should.

    Raises:
        ApiError: what the client shall see.
    """
    if ask.stream:
        return await Events.of(_events(backend, ask, writer, reading, shown))
    async with aclosing(_said(backend, ask, reading, shown)) as pieces:
        async for said in pieces:
            writer.push(said)
    return JSONResponse(writer.whole())


async def _said(
    backend: Backend, ask: Ask, reading: Reading, shown: Callable[[str], str] | None
) -> AsyncGenerator[Said, None]:
    reader = reading.reader(partial=ask.stream)
    async with aclosing(answer(backend, ask)) as chunks:
        async for _, chunk in chunks:
            text, reason = chunk.text, chunk.finish_reason
            if reason == "stop" and shown is not None:
                text = shown(text)
            thinks = reader.thinks
            thought, parts = reader.push(text, last=reason is not None)
            entries = [] if reader.thinks else behind_thought(chunk.logprobs) if thinks or thought else chunk.logprobs
            if reason is not None:
                await reading.count(reader)
            if thought:
                yield Said("", [], None, thought=thought)
            parts = parts or [""]
            for number, part in enumerate(parts, 1):
                logprobs = entries if number == 1 else []
                yield Said(part, logprobs, reason if number == len(parts) else None, reader.is_cut)


async def _events(
    backend: Backend, ask: Ask, writer: Writer, reading: Reading, shown: Callable[[str], str] | None
) -> AsyncGenerator[bytes, None]:
    begun = False
    try:
        async with aclosing(_said(backend, ask, reading, shown)) as pieces:
            async for said in pieces:
                if events := writer.push(said):
                    yield _written(events)
                    begun = True
    except Exception as error:
        if not begun:  # it still has a status of its own
            raise
        yield _written(writer.failed(in_stream(error, ask.exchange)))


def _written(events: list[dict[str, Any]]) -> bytes:
    """Server-sent events with their names."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event, separators=(",", ":")).encode())
        for event in events
    )
