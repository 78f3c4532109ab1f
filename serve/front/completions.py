"""`/v1/completions`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.core.errors import PenjingError
from penjing.core.text.detokenizer import IncrementalDetokenizer
from penjing.core.text.tokenizer import Tokenizer
from penjing.serve.client.wire_text import Chunk
from penjing.serve.front.answers import DONE, Ask, Events, answer, event, opening
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import CompletionBody
from penjing.serve.front.logprobs import Entry, TextOffsets, of_completion
from penjing.serve.gate.body import read_body
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange

TAIL = 16  # characters before an answer that say how its first token is spaced; most tokens have fewer


async def complete(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(CompletionBody, request.headers.get("content-type", ""), exchange.body)
    ask = _ask(backend, body, exchange)
    tokenizer = None
    if body.echo or body.logprobs is not None:
        with nullcontext() if body.echo else suppress(PenjingError):  # its folder may be gone, which only echo needs
            tokenizer = await backend.upstream(ask.model).tokenizer()
    texts = _Texts(ask, body, [await _prompt(tokenizer, prompt, body) for prompt in ask.prompts], tokenizer)
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
        only_prompts=body.max_tokens == 0,
        timeout=backend.timeout,
    )


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]  # type: ignore[list-item]
    return list(prompt)  # type: ignore[arg-type]


@dataclass
class _Prompt:
    """What an answer needs of its prompt."""

    text: str = ""
    """Where it is echoed."""
    first: tuple[int, str] | None = None
    """Its first token and that one's text, which has no probability; where it is echoed with those of the others."""
    num_added: int = 0
    """Tokens at its beginning that are none of the text's, such as begin-of-text."""
    tail: Sequence[int] = ()
    """Its last tokens, or a few more or less, where the answer's tokens are placed."""


async def _prompt(tokenizer: Tokenizer | None, prompt: str | list[int], body: CompletionBody) -> _Prompt:
    if tokenizer is None:
        return _Prompt()
    ids: list[int] = []
    if not isinstance(prompt, str):
        ids = prompt
    elif body.logprobs is not None:
        ids = await asyncio.to_thread(tokenizer.encode_beside, prompt if body.echo else prompt[-TAIL:])
    if not body.echo:
        return _Prompt(tail=ids[-TAIL:])
    first = (ids[0], tokenizer.decode(ids[:1], skip_special=False)) if ids else None
    if isinstance(prompt, str):
        return _Prompt(prompt, first, len(tokenizer.encode_beside("")), ids[-TAIL:])
    return _Prompt(tokenizer.decode(prompt, skip_special=False), first, 0, ids[-TAIL:])


class _Texts:
    """What each answer shows of its chunks: the prompt first where it is echoed, and how far it is."""

    def __init__(self, ask: Ask, body: CompletionBody, prompts: Sequence[_Prompt], tokenizer: Tokenizer | None) -> None:
        self._ask, self._prompts, self._tokenizer = ask, prompts, tokenizer
        self._scores: dict[int, list[Entry | None] | None] = {}
        self._offsets: dict[int, TextOffsets] = {}
        self._count = body.logprobs
        self._skip_special = body.skip_special_tokens is not False

    def index(self, prompt: int, chunk: Chunk) -> int:
        """Of the answer among all of the request."""
        return prompt * self._ask.n + chunk.index

    def of(self, prompt: int, chunk: Chunk) -> tuple[str, dict[str, Any] | None]:
        """New text and log probabilities of an answer."""
        index, asked = self.index(prompt, chunk), self._prompts[prompt]
        text = "" if self._ask.only_prompts else chunk.text
        entries: list[Entry | None] = []
        begins: list[int] = []
        if index not in self._offsets:
            text = asked.text + text
            if chunk.prompt_logprobs is not None:
                self._scores[prompt] = chunk.prompt_logprobs
            entries = self._scores.get(prompt) or []
            begins = self._of_prompt(asked, entries)
            self._offsets[index] = self._of_answer(asked)
        offsets = self._offsets[index]
        if self._count is None:
            return text, None
        if not self._ask.only_prompts:
            entries = [*entries, *chunk.logprobs]
            begins += [offsets.push(*_token(entry)) for entry in chunk.logprobs]
        if not entries:
            return text, None
        return text, of_completion(entries, self._count, begins, asked.first[1] if asked.first else "")

    def _of_prompt(self, asked: _Prompt, entries: Sequence[Entry | None]) -> list[int]:
        """Where the tokens of an echoed prompt begin."""
        if self._tokenizer is None or asked.first is None or not entries:
            return []
        tokens = [asked.first if entry is None else _token(entry) for entry in entries]
        offsets = TextOffsets(IncrementalDetokenizer(self._tokenizer, skip_special=False))
        return [0] * asked.num_added + [offsets.push(*token) for token in tokens[asked.num_added :]]

    def _of_answer(self, asked: _Prompt) -> TextOffsets:
        detokenizer = None
        if self._tokenizer is not None and self._count is not None:
            detokenizer = IncrementalDetokenizer(self._tokenizer, self._skip_special, asked.tail)
        return TextOffsets(detokenizer, len(asked.text))


def _token(entry: Entry) -> tuple[int, str]:
    number, said = next(iter(entry.items()))
    return int(number), said["decoded_token"]


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
