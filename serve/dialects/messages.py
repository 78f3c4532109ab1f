"""`/v1/messages`: Anthropic's Messages interface, as another form of a chat."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penjing.core.errors import PenjingError
from penjing.serve.dialects.message_body import CountBody, MessageBody
from penjing.serve.dialects.message_writer import MessageWriter, StopText
from penjing.serve.dialects.writer import respond
from penjing.serve.front.answers import Ask
from penjing.serve.front.backend import Backend
from penjing.serve.front.chat import chat_ask
from penjing.serve.front.reading import Reading
from penjing.serve.gate.body import read_body
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange


async def answer_message(backend: Backend, request: Request) -> Response:
    """Answer one request."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(MessageBody, request.headers.get("content-type", ""), exchange.body)
    chat = body.chat()
    ask = chat_ask(backend, chat, exchange)
    reading = await Reading.of(backend, ask, chat, "thinking")
    stop = StopText(())
    if body.stop_sequences and not body.include_stop_str_in_output:
        stop = StopText(body.stop_sequences, await _ends(backend, ask))
    return await respond(backend, ask, MessageWriter(ask, stop), reading, shown=stop.cut)


async def _ends(backend: Backend, ask: Ask) -> set[str]:
    """What tokens that end the answer look like where they are shown: at its beginning, and within it, where some
    tokenizers put a space before."""
    sampling, tokenizer = ask.sampling, await backend.upstream(ask.model).tokenizer()
    tokens = {*sampling.get("stop_token_ids", ()), *(() if sampling.get("ignore_eos") else tokenizer.eos_token_ids)}
    skip = sampling.get("skip_special_tokens", True)

    def texts() -> set[str]:
        first = {token: tokenizer.decode([token], skip_special=skip) for token in tokens}
        later = (tokenizer.decode([token] * 2, skip_special=skip)[len(text) :] for token, text in first.items())
        return {*first.values(), *later} - {""}

    return await asyncio.to_thread(texts)


async def count_tokens(backend: Backend, request: Request) -> Response:
    """How many tokens the prompt of a message would have; the model is not asked."""
    exchange: Exchange = request.scope["state"]["exchange"]
    body = read_body(CountBody, request.headers.get("content-type", ""), exchange.body)
    ask = chat_ask(backend, body.chat(), exchange)
    if "images" in ask.sampling:
        text = "The tokens of images are not counted: leave them out."
        raise ApiError(400, text, code="unsupported", param="messages")
    upstream = backend.upstream(ask.model)
    tokenizer, template = await upstream.tokenizer(), await upstream.chat_template()
    if template is None:
        text = f"{ask.model.id} has no chat template; ask it at /v1/completions."
        raise ApiError(400, text, code="wrong_model", param="model")

    def count() -> int:
        prompt = template.render(ask.messages or [], **ask.sampling.get("chat_template_kwargs", {}))
        return len(tokenizer.encode_beside(prompt, False))

    try:
        return JSONResponse({"input_tokens": await asyncio.to_thread(count)})
    except PenjingError as error:
        raise backend.error(error, upstream) from None
