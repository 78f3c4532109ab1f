"""`/v1/embeddings`: what a served text encoder, or the text tower of two, makes of texts, bit for bit."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.core.errors import PenjingError
from penjing.serve.client.protocol import MAX_TEXT_BYTES
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import Body, read_body
from penjing.serve.gate.config import FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange


class EmbeddingBody(Body):
    """Of `/v1/embeddings`."""

    input: str | list[str] = Field(description="A text, or a list of texts.")
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="float is a list of numbers; base64 is of float32, the lowest byte first."
    )
    dimensions: int | None = Field(default=None, ge=1, description="May be the model's own only.")
    user: str | None = Field(default=None, description="Of several versions of a model, a user has always the same.")

    @field_validator("input", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        if isinstance(value, list) and value and isinstance(value[0], int | list):
            raise PydanticCustomError("token_ids", "token ids are not read here: send texts")
        return value

    @property
    def texts(self) -> list[str]:
        """One or more."""
        return [self.input] if isinstance(self.input, str) else self.input


async def answer_embeddings(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(EmbeddingBody, request.headers.get("content-type", ""), exchange.body)
    model = backend.encoder(body.model, exchange, body.user)
    exchange.model = model.id
    texts = body.texts
    _check_texts(texts, backend.max_prompts)
    tried: set[str] = set()
    while True:
        try:
            rows = await _rows(backend, model, texts, body.dimensions, exchange)
            break
        except ApiError as error:  # another version is asked where this one has gone and nothing has come yet
            tried.add(model.key)
            other = backend.another(exchange, tried) if error.status == 503 and not exchange.prompt_tokens else None
            if other is None:
                raise
            model = other
    exchange.model = model.id
    shown = _base64 if body.encoding_format == "base64" else np.ndarray.tolist
    data = [{"object": "embedding", "index": index, "embedding": shown(row)} for index, row in enumerate(rows)]
    usage = {"prompt_tokens": exchange.prompt_tokens, "total_tokens": exchange.prompt_tokens}
    return JSONResponse({"object": "list", "data": data, "model": model.id, "usage": usage})


def _check_texts(texts: list[str], most: int) -> None:
    """What needs no tokenizer; one that is longer than the model reads is cut by it, as over gRPC."""
    if not 0 < len(texts) <= most:
        text = f"input: give 1 to {most} texts, not {len(texts)}."
        raise ApiError(400, text, code="invalid_value", param="input")
    for index, text in enumerate(texts):
        if not text:
            raise ApiError(400, f"input: text {index} is empty.", code="invalid_value", param="input")
        if (size := len(text.encode())) > MAX_TEXT_BYTES:
            text = f"input: text {index} has {size} bytes, at most {MAX_TEXT_BYTES} are read; shorten it."
            raise ApiError(400, text, code="invalid_value", param="input")


async def _rows(
    backend: Backend, model: FrontModel, texts: list[str], dimensions: int | None, exchange: Exchange
) -> np.ndarray:
    """(texts, hidden) float32. More texts than the model takes at once are asked one part after the other: together,
    parts would stand in each other's batches."""
    upstream = backend.upstream(model)
    tokenizer = await upstream.text_tokenizer()
    if dimensions not in (None, upstream.dimension):
        text = f"dimensions: {model.id} has {upstream.dimension}, not {dimensions}; leave it out."
        raise ApiError(400, text, code="unsupported", param="dimensions")
    ends = time.monotonic() + backend.timeout
    size = model.max_rows or len(texts)
    found = []
    try:
        with upstream.running():
            for begin in range(0, len(texts), size):
                part = texts[begin : begin + size]
                tokens = await asyncio.to_thread(tokenizer.rows, part)  # without Python's lock: nobody waits
                seconds = max(0.0, ends - time.monotonic())
                found.append(await upstream.client.embed(part, timeout=seconds, request_id=exchange.request_id))
                exchange.count(sum(map(len, tokens)), 0)
    except PenjingError as error:
        raise backend.error(error, upstream) from None
    upstream.alive()
    return np.concatenate(found)


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
