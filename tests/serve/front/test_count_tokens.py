"""`/v1/messages/count_tokens` without a server: what a template refuses is the client's error, not ours."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from starlette.requests import Request

from penjing.core.text.chat import ChatTemplate
from penjing.serve.dialects.messages import count_tokens
from penjing.serve.front.backend import Backend
from penjing.serve.front.upstream import Upstream
from penjing.serve.gate.errors import ApiError
from penjing.serve.gate.guard import Exchange
from tests.serve.front.test_openapi import front_job


async def no_tokenizer(upstream: Upstream) -> None:
    return None


async def refusing(upstream: Upstream) -> ChatTemplate:
    return ChatTemplate("{{ raise_exception('only three turns') }}", "here")


def test_messages_that_the_template_rejects_are_an_error_of_400(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upstream, "tokenizer", no_tokenizer)
    monkeypatch.setattr(Upstream, "chat_template", refusing)
    body = {"model": "a", "messages": [{"role": "user", "content": "b"}]}
    exchange = Exchange("id", body=json.dumps(body).encode())
    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "headers": headers, "state": {"exchange": exchange}})

    async def ask() -> None:
        backend = Backend(front_job(tmp_path))
        try:
            await count_tokens(backend, request)
        finally:
            await backend.close()

    with pytest.raises(ApiError, match="only three turns") as error:
        asyncio.run(ask())
    assert (error.value.status, error.value.param) == (400, "messages")
