"""A connection of uvicorn's that does not wait without an end, for headers or for a reader; and how many there are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from penjing.serve.gate.config import FrontLimits
from penjing.serve.gate.errors import RETRY_SECONDS, ApiError

READ_SECONDS = 0.05  # one turn of the event loop and more
LINGER_SECONDS = 1.0


class _Parser(httptools.HttpRequestParser):
    """Goes on with HTTP/1.1 where a client offers another protocol, as a server may (RFC 9110, 7.8). Java's own client
    offers HTTP/2 with each request, and httptools would take the body for a part of that.

    Args:
        connection: whose headers are those of the request.
    """

    def __init__(self, connection: HttpToolsProtocol) -> None:
        super().__init__(connection)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # uvicorn's: an answer under way is not broken off
        self._connection = connection

    def feed_data(self, data: Any) -> None:
        while True:
            try:
                return super().feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("this is no proxy") from None
                data = self._head_without_offer() + data[offer.args[0] :]

    def _head_without_offer(self) -> bytes:
        line = b"%b %b HTTP/%b" % (self.get_method(), self._connection.url, self.get_http_version().encode())
        headers = [b"%b: %b" % header for header in self._connection.headers if header[0] != b"upgrade"]
        return b"\r\n".join((line, *headers, b"", b""))


def loop_factory(limits: FrontLimits) -> Callable[[], uvloop.Loop]:
    """Event loops whose servers wait for the beginning and the end of TLS as long as for headers: uvicorn leaves the
    loop's minute, and a connection is one of its own only when TLS has begun."""

    class Loop(uvloop.Loop):
        async def create_server(self, *arguments: Any, ssl: Any = None, **named: Any) -> Any:
            if ssl is not None:
                named |= {"ssl_handshake_timeout": limits.header_timeout, "ssl_shutdown_timeout": limits.header_timeout}
            return await super().create_server(*arguments, ssl=ssl, **named)

    return Loop


def connection_class(limits: FrontLimits) -> type[asyncio.Protocol]:
    """The class of a front's connections."""
    lingering: set[asyncio.Protocol] = set()

    class Connection(HttpToolsProtocol):
        """One connection."""

        _header_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None
        _linger_timer: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _unread = 0
        _refused = False

        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.parser = _Parser(self)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                self._refuse(
                    ApiError(503, "Too many connections are open.", code="overloaded", retry_after=RETRY_SECONDS)
                )
            else:
                self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._header_timer, self._write_timer, self._linger_timer, self.timeout_keep_alive_task):
                if timer is not None:
                    timer.cancel()
            lingering.discard(self)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused or self.transport.is_closing():
                return
            super().data_received(data)
            if self._refused:
                return
            if self._header_timer is not None:  # a header that has not ended yet has reached no `on_header`
                self._unread += len(data)
                if self._unread > limits.max_header_bytes:
                    self._refuse_headers()
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self._header_timer is None and not self.transport.is_closing():
                self._await_headers()  # of the next request, which has begun: the idle timer is off
                self._unread = len(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0

        def on_url(self, url: bytes) -> None:
            self._count(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._count(name, value)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self.parser.should_upgrade():
                return  # they come again, without the offer
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None
            if not self._refused:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused and not self.parser.should_upgrade():
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            if not self._refused:
                self._refuse(ApiError(400, "This is no valid HTTP request.", code="bad_http"))

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(limits.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

        def timeout_keep_alive_handler(self) -> None:
            self.transport.abort()  # `close` would wait for a client that does not read the last bytes

        def _count(self, *parts: bytes) -> None:
            self._header_bytes += sum(map(len, parts)) + 4
            if self._header_bytes > limits.max_header_bytes:
                self._refuse_headers()

        def _refuse_headers(self) -> None:
            if not self._refused:
                self._refuse(ApiError(431, f"Headers may have {limits.max_header_bytes} bytes.", code="too_large"))

        def _await_headers(self) -> None:
            self._unread = 0
            self._header_timer = self.loop.call_later(limits.header_timeout, self._headers_seem_late)

        def _headers_seem_late(self) -> None:
            # Timers run before sockets are read: where this process was kept from running, the headers lie there.
            self._header_timer = self.loop.call_later(READ_SECONDS, self._headers_are_late)

        def _headers_are_late(self) -> None:
            self._header_timer = None
            if self._unread:
                self._refuse(ApiError(408, "The headers took too long to come.", code="timeout"))
            else:
                self.transport.abort()

        def _refuse(self, error: ApiError) -> None:
            """Answer by hand, since no request has been read, and close."""
            self._refused = True
            if self._header_timer is not None:
                self._header_timer.cancel()
            lines = [f"HTTP/1.1 {error.status} Refused", "content-type: application/json", "connection: close"]
            lines += [f"content-length: {len(error.body)}", *(f"{k}: {v}" for k, v in error.headers.items())]
            self.transport.write("\r\n".join([*lines, "", ""]).encode() + error.body)
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy or not self.transport.can_write_eof() or len(lingering) >= limits.max_connections:
                self.transport.close()
                return
            # Closed at once, it would lose its answer while it still sends; it takes no place of others meanwhile.
            self.transport.write_eof()
            self.connections.discard(self)
            lingering.add(self)
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    return Connection
