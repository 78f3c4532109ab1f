"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import Body, TokenIds
from penjing.serve.gate.body import read_body
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange


class TokenizeBody(Body):
    """Of `/tokenize`."""

    model: str | None = Field(default=None, description="What `/v1/models` lists; the first language model.")  # type: ignore[assignment]
    prompt: str = Field(description="A text.")
    add_special_tokens: bool | None = Field(default=None, description="Begin-of-text where the model has one; true.")


class DetokenizeBody(Body):
    """Of `/detokenize`."""

    model: str | None = Field(default=None, description="What `/v1/models` lists; the first language model.")  # type: ignore[assignment]
    tokens: TokenIds = Field(description="Token ids.")


async def tokenize(backend: Backend, request: Request) -> Response:
    """Token ids of a text."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(TokenizeBody, request.headers.get("content-type", ""), exchange.body)
    tokenizer = await backend.upstream(backend.decoder(body.model, exchange)).tokenizer()
    ids = await asyncio.to_thread(tokenizer.encode_beside, body.prompt, body.add_special_tokens is not False)
    return JSONResponse({"tokens": ids, "count": len(ids)})


async def detokenize(backend: Backend, request: Request) -> Response:
    """The text of token ids."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(DetokenizeBody, request.headers.get("content-type", ""), exchange.body)
    tokenizer = await backend.upstream(backend.decoder(body.model, exchange)).tokenizer()
    if unknown := [number for number in body.tokens if number >= tokenizer.vocab_size]:
        raise ApiError(400, f"tokens: {unknown[0]} is no token of this model.", code="invalid_value", param="tokens")
    return JSONResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens, False)})
