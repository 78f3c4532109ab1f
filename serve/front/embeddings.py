"""`/v1/embeddings`: what a served text encoder makes of texts, or two towers of texts and images, bit for bit."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.core.errors import PenjingError, RequestError
from penjing.serve.client.protocol import MAX_TEXT_BYTES, TOWERS
from penjing.serve.front.backend import Backend
from penjing.serve.front.bodies import Body, ImagePart, TextPart, TokenIds
from penjing.serve.gate.body import read_body
from penjing.serve.gate.config import FrontModel
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.fields import Unused
from penjing.serve.gate.guard import Exchange
from penjing.serve.sight.wire import from_data_url

if TYPE_CHECKING:
    from penjing.core.text.text_tokenizer import TextTokenizer

Given = str | list[int] | bytes
"""A text, its token ids, or the file of an image."""
Item = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class EmbeddingBody(Body, Unused):
    """Of `/v1/embeddings`."""

    input: str | Item | list[str | Item] | TokenIds | list[TokenIds] = Field(
        description="A text, its token ids, or an image for two towers as a part of a chat's message; or a list."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="float is a list of numbers; base64 is of float32, the lowest byte first."
    )
    dimensions: int | None = Field(default=None, ge=1, description="May be the model's own only.")
    user: str | None = Field(default=None, description="Of several versions of a model, a user has always the same.")

    def items(self) -> list[Given]:
        """Texts or their token ids, and the files of images.

        Raises:
            RequestError: an image lies elsewhere, or is no base64.
        """
        given: list[Any] = self.input if isinstance(self.input, list) else [self.input]
        if given and isinstance(given[0], int):
            given = [given]
        return [
            each.text
            if isinstance(each, TextPart)
            else from_data_url(each.image_url.url)
            if isinstance(each, ImagePart)
            else each
            for each in given
        ]


async def answer_embeddings(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(EmbeddingBody, request.headers.get("content-type", ""), exchange.body)
    model = backend.encoder(body.model, exchange, body.user)
    exchange.model = model.id
    try:
        items = body.items()
    except RequestError as error:
        raise ApiError(400, f"{error}.", code="invalid_value", param="input") from None
    _check_items(items, model, backend.max_prompts)
    tried: set[str] = set()
    while True:
        try:
            rows = await _rows(backend, model, items, body.dimensions, exchange)
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


def _check_items(items: list[Given], model: FrontModel, most: int) -> None:
    """Of items as they came, and of the texts of token ids; a text that is longer than the model reads is cut by it, as
    over gRPC."""

    def wrong(text: str) -> ApiError:
        return ApiError(400, f"input: {text}", code="invalid_value", param="input")

    if not 0 < len(items) <= most:
        raise wrong(f"give 1 to {most} texts or images, not {len(items)}.")
    for index, item in enumerate(items):
        if isinstance(item, bytes):
            if model.kind != TOWERS:
                raise wrong(f"{index} is an image, and {model.id} reads texts alone; ask two towers.")
        elif not item:
            raise wrong(f"text {index} is empty.")
        elif isinstance(item, str) and (size := len(item.encode())) > MAX_TEXT_BYTES:
            raise wrong(f"text {index} has {size} bytes, at most {MAX_TEXT_BYTES} are read; shorten it.")


async def _rows(
    backend: Backend, model: FrontModel, items: list[Given], dimensions: int | None, exchange: Exchange
) -> np.ndarray:
    """(items, hidden) float32. More than the model takes at once are asked one part after the other: together, parts
    would stand in each other's batches."""
    upstream = backend.upstream(model)
    tokenizer = await upstream.text_tokenizer()
    if dimensions not in (None, upstream.dimension):
        text = f"dimensions: {model.id} has {upstream.dimension}, not {dimensions}; leave it out."
        raise ApiError(400, text, code="unsupported", param="dimensions")
    items = await asyncio.to_thread(_read, items, tokenizer, model)
    _check_items(items, model, backend.max_prompts)
    ends = time.monotonic() + backend.timeout
    size = model.max_rows or len(items)
    found = np.empty((len(items), upstream.dimension), np.float32)
    texts = [index for index, item in enumerate(items) if isinstance(item, str)]
    images = [index for index, item in enumerate(items) if isinstance(item, bytes)]
    try:
        with upstream.running():
            for places in (
                rows[begin : begin + size] for rows in (texts, images) for begin in range(0, len(rows), size)
            ):
                part: Any = [items[place] for place in places]
                asked = {"timeout": max(0.0, ends - time.monotonic()), "request_id": exchange.request_id}
                if isinstance(part[0], bytes):
                    found[places] = await upstream.client.embed_images(part, **asked)
                    exchange.count(len(part) * upstream.image_tokens, 0)
                    continue
                tokens = await asyncio.to_thread(tokenizer.rows, part)  # without Python's lock: nobody waits
                found[places] = await upstream.client.embed(part, **asked)
                exchange.count(sum(map(len, tokens)), 0)
    except PenjingError as error:
        raise backend.error(error, upstream) from None
    upstream.alive()
    return found


def _read(items: list[Given], tokenizer: TextTokenizer, model: FrontModel) -> list[Given]:
    """`items` with texts in place of token ids. Ids of another tokenizer would give a vector of other words, without a
    word."""
    found = [tokenizer.text_of(item) if isinstance(item, list) else item for item in items]
    if None in found:
        text = (
            f"input: token ids {found.index(None)} are not those that {model.id}'s own tokenizer writes for a text, "
            "with its marks before and behind it; send texts. LangChain's OpenAIEmbeddings sends ids of OpenAI's "
            "tokenizers unless it has check_embedding_ctx_length=False."
        )
        raise ApiError(400, text, code="invalid_value", param="input")
    return [item for item in found if item is not None]


def _base64(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()
