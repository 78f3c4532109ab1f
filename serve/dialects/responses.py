"""`/v1/responses`: OpenAI's Responses interface, as another form of a chat. Nothing is kept between requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from penjing.serve.dialects.response_body import ResponseBody
from penjing.serve.dialects.response_writer import ResponseWriter
from penjing.serve.dialects.writer import respond
from penjing.serve.front.backend import Backend
from penjing.serve.front.chat import chat_ask
from penjing.serve.front.reading import Reading
from penjing.serve.gate.body import read_body
from penjing.serve.gate.guard import Exchange


async def answer_response(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(ResponseBody, request.headers.get("content-type", ""), exchange.body)
    chat = body.chat()
    ask = chat_ask(backend, chat, exchange)
    reading = await Reading.of(backend, ask, chat, "reasoning")
    return await respond(backend, ask, ResponseWriter(ask, body), reading)
