"""What every request passes before anything else sees it: who may ask, from where, how much, and for how long."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from penjing.serve.access.limits import Account
from penjing.serve.gate.admission import Admission
from penjing.serve.gate.config import FrontConfig
from penjing.serve.gate.errors import RETRY_SECONDS, ApiError, draining, failed

Stages = tuple[float, float, float]
"""Queue, prefill and decode."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
ALWAYS_OPEN = ("/health/live", "/health/ready")
"""Probes of an orchestrator: no key, no draining, any name of this machine."""
KEYLESS = (*ALWAYS_OPEN, "/")
"""The page asks for a key by itself."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
LINGER_BYTES, LINGER_SECONDS = 32 << 20, 1.0
LEFT = 499  # nginx's status, in logs and metrics alone: the client has gone
CORS = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-expose-headers": "retry-after, x-request-id",  # clients wait as told, and name a request
    "access-control-max-age": "600",
    "vary": "origin",
}

log = logging.getLogger("penjing.front")


@dataclass
class Exchange:
    """One request and what it has cost so far; `scope["state"]["exchange"]`."""

    request_id: str
    path: str = ""
    body: bytes = b""
    held: int = 0
    """Bytes of a large body, as counted against those of all requests."""
    asked: str = ""
    """The model's name as the client wrote it; `model` is who answers."""
    model: str = ""
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reason: str = ""
    """Of a refusal: the error's code."""
    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    """Seconds from the start."""
    account: Account | None = None
    """Of the key, where keys are asked for."""
    traced: bool = False
    """Whether a span is made of it, so that the engine is asked where its time goes."""
    stages: list[tuple[float, Stages]] = field(default_factory=list)
    """Of the first answer to each prompt: when it ended, in seconds from the start, and its seconds in the engine."""

    @property
    def key(self) -> str:
        """The name of the key."""
        return "" if self.account is None else self.account.key.name

    def count(self, prompt_tokens: int, completion_tokens: int) -> None:
        """Note tokens that have come; the key pays for them."""
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens
        if self.account is not None:
            self.account.spend(prompt_tokens + completion_tokens)


class Guard:
    """The outermost application; whatever happens inside, the client gets an answer of OpenAI's form.

    Args:
        app: gets requests whose body has been read: it lies in `scope["state"]["exchange"]`.
        ended: is called once for each request, when it has its answer or has gone.
        sees: whether a model takes images now, so that bodies may be larger.
        traced: whether spans are made of requests.

    Raises:
        InputError: the file of keys cannot be used.
    """

    def __init__(
        self,
        app: App,
        config: FrontConfig,
        ended: Callable[[Message, Exchange], None],
        sees: Callable[[], bool] = lambda: False,
        *,
        traced: bool = False,
    ) -> None:
        self._traced = traced
        self.app, self._limits, self._ended, self._sees = app, config.limits, ended, sees
        self._held = 0
        names = (*LOCAL_NAMES, config.host, *config.limits.allowed_hosts)
        self._hosts = set(map(str.lower, names)) if config.is_local else None
        self._admission = Admission(config.keys)
        self.draining = False
        self.num_running = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        exchange = Exchange(given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12), scope["path"])
        exchange.traced = self._traced
        scope.setdefault("state", {})["exchange"] = exchange
        begun = False
        answer = _Answer(send, exchange, {"x-request-id": exchange.request_id})
        self.num_running += 1
        try:
            origin = self._check_source(scope, headers)
            if origin:
                answer.headers |= {"access-control-allow-origin": origin} | CORS
            if origin and scope["method"] == "OPTIONS":
                # Any: OpenAI's and Anthropic's clients send headers of their own, and new ones with each version.
                answer.headers["access-control-allow-headers"] = headers.get("access-control-request-headers", "")
                return await answer.send_whole(204, b"")
            if self.draining and scope["path"] not in ALWAYS_OPEN:
                raise draining()
            if scope["path"] not in KEYLESS:
                exchange.account = self._admission.account(headers, scope["path"])
            if exchange.account is not None and scope["method"] == "POST":
                self._admission.begin(exchange.account)
                begun = True
                answer.headers |= exchange.account.headers()
            exchange.body = await self._read_body(scope, headers, receive)
            answer.body_is_read = True
            await self._run(scope, receive, answer)
        except ApiError as error:
            if not answer.body_is_read and "expect" not in headers:
                await _discard(receive)
            await answer.send_error(error)
        except _GoneError:
            exchange.status = LEFT
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            if not answer.complete:  # else the application has told the client
                await answer.send_error(failed())
        finally:
            self.num_running -= 1
            self._held -= exchange.held
            if begun and exchange.account is not None:
                exchange.account.end()
            self._ended(scope, exchange)

    async def _run(self, scope: Message, receive: Receive, answer: _Answer) -> None:
        """Run the application until it has answered or its client has gone; then it is cancelled."""
        work = asyncio.ensure_future(self.app(scope, _nothing_more, answer.send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not answer.complete:
                raise _GoneError
            await work
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _check_source(self, scope: Message, headers: dict[str, str]) -> str | None:
        """The foreign origin that may call, if there is one; a page that only has our address (as by DNS rebinding) is
        refused."""
        host = headers.get("host", "").lower()
        if self._hosts is not None and scope["path"] not in ALWAYS_OPEN:
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in self._hosts:
                raise ApiError(
                    403,
                    "This server is reached as localhost only; to allow another name start it with --front "
                    "'allowed_hosts=[\"NAME\"]'.",
                    code="host_not_allowed",
                )
        origin = headers.get("origin")
        if origin is None:
            return None
        if origin in self._limits.allowed_origins:
            return origin
        if host and _host_of(origin) == host:
            return None
        raise ApiError(
            403,
            "Web pages of other origins may not call this server; to allow one start it with --front "
            "'allowed_origins=[\"ORIGIN\"]'.",
            code="origin_not_allowed",
        )

    async def _read_body(self, scope: Message, headers: dict[str, str], receive: Receive) -> bytes:
        usual = limit = self._limits.max_body_bytes
        if self._sees():
            limit = max(usual, self._limits.max_image_body_bytes)
        exchange: Exchange = scope["state"]["exchange"]
        too_large = ApiError(413, f"The body may have {limit} bytes.", code="too_large")
        length = headers.get("content-length", "")
        if length and not (re.fullmatch("[0-9]{1,18}", length) and int(length) <= limit):
            raise too_large
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "Compressed bodies are not read; send plain JSON.", code="unsupported_encoding")
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    if part := message.get("body", b""):
                        parts.append(part)
                        size += len(part)
                    if size > limit:
                        raise too_large
                    if size > usual:
                        self._hold(exchange, size)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(408, "The body took too long to come.", code="timeout") from None

    def _hold(self, exchange: Exchange, size: int) -> None:
        """Count a large body, of which so much has come: many of them together could take all memory."""
        if self._held + size - exchange.held > self._limits.max_held_bytes:
            text = f"Large bodies of other requests have {self._held} bytes already; try again."
            raise ApiError(503, text, code="overloaded", retry_after=RETRY_SECONDS)
        self._held += size - exchange.held
        exchange.held = size


class _GoneError(Exception):
    """The client has left."""


class _Answer:
    """The way back to the client: remembers how far the answer is."""

    def __init__(self, send: Send, exchange: Exchange, headers: dict[str, str]) -> None:
        self._send, self._exchange = send, exchange
        self.headers = headers
        self.started = self.complete = self.body_is_read = False

    async def send(self, message: Message) -> None:
        """ASGI's `send`, with our headers."""
        if message["type"] == "http.response.start":
            self.started = True
            self._exchange.status = message["status"]
            ours = [(name.encode(), value.encode()) for name, value in self.headers.items()]
            message = {**message, "headers": [*message.get("headers", ()), *ours]}
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    async def send_error(self, error: ApiError) -> None:
        """An error as the whole answer; where an answer has begun it is broken off."""
        self._exchange.reason = error.code or ""
        if self.started:
            raise error
        self.headers |= error.headers | {"content-type": "application/json"}
        if not self.body_is_read:
            self.headers["connection"] = "close"  # who knows how much more would come
        await self.send_whole(error.status, error.told(self._exchange.path, self._exchange.request_id))

    async def send_whole(self, status: int, body: bytes) -> None:
        """A short answer."""
        self.headers["content-length"] = str(len(body))
        await self.send({"type": "http.response.start", "status": status, "headers": []})
        await self.send({"type": "http.response.body", "body": body})


def _host_of(origin: str) -> str:
    """With its port; "" if it is no origin."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # such as an open bracket
        return ""


async def _discard(receive: Receive) -> None:
    """Read what a client is still sending, for a moment: closed at once it would lose its answer too."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while size < LINGER_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


async def _nothing_more() -> Message:
    """`receive` of the application: the body has been read."""
    return {"type": "http.disconnect"}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
