"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.core.errors import RequestError
from penjing.serve.front.answers import DONE, Ask, Events, answer, event, opening
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import ChatBody
from penjing.serve.front.logprobs import of_chat
from penjing.serve.front.reading import AnswerReader, Reading
from penjing.serve.front.tools import apart
from penjing.serve.gate.body import read_body
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange


async def answer_chat(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(ChatBody, request.headers.get("content-type", ""), exchange.body)
    ask = chat_ask(backend, body, exchange)
    reading = await Reading.of(backend, ask, body)
    head = {
        "id": f"chatcmpl-{exchange.request_id}",
        "object": "chat.completion.chunk" if ask.stream else "chat.completion",
        "created": int(time.time()),
        "model": ask.model.id,  # until it has gone and another version answers
    }
    if ask.stream:
        return await Events.of(_events(backend, ask, head, body, reading))
    return JSONResponse(await _whole(backend, ask, head, body, reading))


def chat_ask(backend: Backend, body: ChatBody, exchange: Exchange) -> Ask:
    """What the engine is asked for.

    Raises:
        ApiError: fields that contradict each other, or a model that does not chat.
    """
    sampling = body.sampling()
    sampling["max_tokens"] = body.max_completion_tokens or body.max_tokens
    if body.logprobs:
        sampling["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", code="invalid_value", param="top_logprobs")
    variables = body.variables()
    if body.offered:
        sampling.setdefault("skip_special_tokens", False)  # in some tokenizers the marks of a call are such
    try:
        images = [image for message in body.messages for image in message.images()]
    except RequestError as error:
        raise ApiError(400, f"{error}.", code="invalid_value", param="messages") from None
    if images:
        sampling["images"] = images
    if variables:
        sampling["chat_template_kwargs"] = variables
    return Ask(
        model=backend.decoder(body.model, exchange, body.user),
        sampling=sampling,
        exchange=exchange,
        messages=[message.rendered() for message in body.messages],
        stream=bool(body.stream),
        timeout=backend.timeout,
    )


async def _whole(backend: Backend, ask: Ask, head: dict[str, Any], body: ChatBody, reading: Reading) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    async with aclosing(answer(backend, ask)) as chunks:
        async for _, chunk in chunks:
            logprobs = of_chat(chunk.logprobs, body.top_logprobs or 0) if "logprobs" in ask.sampling else None
            reason, reader = chunk.finish_reason, reading.reader(partial=False)
            thought, parts = reader.push(chunk.text, last=True)
            text, calls = apart(parts)
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
            if thought:
                message["reasoning_content"] = thought
                await reading.count(reader)
            if calls:
                calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
                message |= {"content": text or None, "tool_calls": calls}
                reason = "tool_calls" if reason == "stop" else reason
            choices[chunk.index] = {
                "index": chunk.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": reason,
            }
    return head | {"model": ask.model.id, "choices": [choices[index] for index in sorted(choices)], "usage": ask.usage}


async def _events(
    backend: Backend, ask: Ask, head: dict[str, Any], body: ChatBody, reading: Reading
) -> AsyncGenerator[bytes, None]:
    """Events by hand: the bytes before and after the text are the same in all of them."""
    start = b""
    end = b'],"usage":null}\n\n' if body.include_usage else b"]}\n\n"
    seen: set[int] = set()
    readers: defaultdict[int, AnswerReader] = defaultdict(lambda: reading.reader(partial=True))
    async with aclosing(answer(backend, ask)) as chunks:
        async for _, chunk in chunks:
            start = start or opening(head, ask)
            index = b'{"index":%d,"delta":{' % chunk.index
            parts = []
            if chunk.index not in seen:
                seen.add(chunk.index)
                parts += [start, index, b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null}', end]
            reader, reason = readers[chunk.index], chunk.finish_reason
            thought, said = reader.push(chunk.text, last=reason is not None)
            text, calls = apart(said)
            if reason is not None:
                await reading.count(reader)
                reason = "tool_calls" if reason == "stop" and reader.calls else reason
            logprobs = json.dumps(of_chat(chunk.logprobs, body.top_logprobs or 0)) if chunk.logprobs else "null"
            if thought:
                parts += [start, index, b'"reasoning_content":', json.dumps(thought).encode()]
                parts += [b'},"logprobs":', logprobs.encode(), b',"finish_reason":null}', end]
                logprobs = "null"
            if text or logprobs != "null":
                parts += [start, index, b'"content":', json.dumps(text).encode()]
                parts += [b'},"logprobs":', logprobs.encode(), b',"finish_reason":null}', end]
            if calls:
                parts += [start, index, b'"tool_calls":', json.dumps(calls).encode()]
                parts += [b'},"logprobs":null,"finish_reason":null}', end]
            if reason:
                parts += [start, index, b'},"logprobs":null,"finish_reason":"%b"}' % reason.encode(), end]
            if parts:
                yield b"".join(parts)
    if body.include_usage:
        yield event(head | {"choices": [], "usage": ask.usage})
    yield DONE
