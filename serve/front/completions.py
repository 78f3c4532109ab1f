"""`/v1/completions`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.serve.client.wire_text import Chunk
from penjing.serve.front.answers import DONE, Ask, Events, answer, event, opening
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import CompletionBody, read_body
from penjing.serve.front.logprobs import Entry, of_completion
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange


async def complete(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(CompletionBody, request.headers.get("content-type", ""), exchange.body)
    ask = _ask(backend, body, exchange)
    texts = _Texts(ask, body, await _shown_prompts(backend, ask, body))
    head = {
        "id": f"cmpl-{exchange.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": ask.model.id,  # until it has gone and another version answers
    }
    if ask.stream:
        return await Events.of(_events(backend, ask, head, body, texts))
    return JSONResponse(await _whole(backend, ask, head, texts))


def _ask(backend: Backend, body: CompletionBody, exchange: Exchange) -> Ask:
    if body.best_of not in (None, body.n or 1):
        raise ApiError(400, "best_of is not supported beside n; leave it out.", code="unsupported", param="best_of")
    if body.suffix is not None:
        raise ApiError(400, "suffix is not supported; leave it out.", code="unsupported", param="suffix")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens may be 0 with echo only.", code="invalid_value", param="max_tokens")
    sampling = body.sampling()
    if body.max_tokens is not None:
        sampling["max_tokens"] = max(1, body.max_tokens)
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
        if body.echo:
            sampling["prompt_logprobs"] = body.logprobs
    prompts = _prompts(body)
    if not prompts or len(prompts) > backend.max_prompts:
        text = f"prompt: give 1 to {backend.max_prompts} prompts, not {len(prompts)}."
        raise ApiError(400, text, code="invalid_value", param="prompt")
    return Ask(
        model=backend.decoder(body.model, exchange, body.user),
        sampling=sampling,
        exchange=exchange,
        prompts=prompts,
        stream=bool(body.stream),
        timeout=backend.timeout,
    )


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


async def _shown_prompts(backend: Backend, ask: Ask, body: CompletionBody) -> list[tuple[str, str]]:
    """Text and first token of each prompt that is echoed."""
    if not body.echo:
        return [("", "")] * len(ask.prompts)
    tokenizer = await backend.upstream(ask.model).tokenizer()
    shown = []
    for prompt in ask.prompts:
        if isinstance(prompt, str):
            ids = await asyncio.to_thread(tokenizer.encode_beside, prompt) if body.logprobs is not None else []
            text = prompt
        else:
            ids, text = prompt, tokenizer.decode(prompt, skip_special=False)
        shown.append((text, tokenizer.decode(ids[:1], skip_special=False)))
    return shown


class _Texts:
    """What each answer shows of its chunks: the prompt first where it is echoed, and how far it is."""

    def __init__(self, ask: Ask, body: CompletionBody, prompts: list[tuple[str, str]]) -> None:
        self._ask, self._prompts = ask, prompts
        self._scores: dict[int, list[Entry | None] | None] = {}
        self._offsets: dict[int, int] = {}
        self._only_prompt = body.max_tokens == 0
        self._count = body.logprobs

    def index(self, prompt: int, chunk: Chunk) -> int:
        """Of the answer among all of the request."""
        return prompt * self._ask.n + chunk.index

    def of(self, prompt: int, chunk: Chunk) -> tuple[str, dict[str, Any] | None]:
        """New text and log probabilities of an answer."""
        index = self.index(prompt, chunk)
        text = "" if self._only_prompt else chunk.text
        entries: list[Entry | None] = [] if self._only_prompt else [*chunk.logprobs]
        before, first = "", ""
        if index not in self._offsets:
            before, first = self._prompts[prompt]
            if chunk.prompt_logprobs is not None:
                self._scores[prompt] = chunk.prompt_logprobs
            entries = [*(self._scores.get(prompt) or []), *entries]
        offset = self._offsets.get(index, 0)
        text = before + text
        self._offsets[index] = offset + len(text)
        if self._count is None or not entries:
            return text, None
        return text, of_completion(entries, self._count, offset, first)


async def _whole(backend: Backend, ask: Ask, head: dict[str, Any], texts: _Texts) -> dict[str, Any]:
    choices: dict[int, dict[str, Any]] = {}
    async with aclosing(answer(backend, ask)) as chunks:
        async for prompt, chunk in chunks:
            text, logprobs = texts.of(prompt, chunk)
            index = texts.index(prompt, chunk)
            choices[index] = {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": chunk.finish_reason,
            }
    return head | {"model": ask.model.id, "choices": [choices[index] for index in sorted(choices)], "usage": ask.usage}


async def _events(
    backend: Backend, ask: Ask, head: dict[str, Any], body: CompletionBody, texts: _Texts
) -> AsyncGenerator[bytes, None]:
    """Events by hand: the bytes before and after the text are the same in all of them."""
    start = b""
    end = b'],"usage":null}\n\n' if body.include_usage else b"]}\n\n"
    async with aclosing(answer(backend, ask)) as chunks:
        async for prompt, chunk in chunks:
            start = start or opening(head, ask)
            text, logprobs = texts.of(prompt, chunk)
            if not (text or logprobs or chunk.finish_reason):
                continue
            yield b"".join(
                (
                    start,
                    b'{"index":%d,"text":' % texts.index(prompt, chunk),
                    json.dumps(text).encode(),
                    b',"logprobs":',
                    b"null" if logprobs is None else json.dumps(logprobs).encode(),
                    b',"finish_reason":',
                    b'"%b"}' % chunk.finish_reason.encode() if chunk.finish_reason else b"null}",
                    end,
                )
            )
    if body.include_usage:
        yield event(head | {"choices": [], "usage": ask.usage})
    yield DONE
