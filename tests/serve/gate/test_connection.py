"""A connection: its times, where the front's process itself was kept from running, offers of other protocols, one too
many, and TLS that does not begin."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop

from penjing.serve.gate.config import FrontLimits
from penjing.serve.gate.connection import connection_class, loop_factory
from tests.serve.certificates import localhost_certificate

HEADER_TIMEOUT = 0.3


async def empty(scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def echo(scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    names = b",".join(name for name, _ in scope["headers"])
    found = b"%b %b [%b] %b;" % (scope["method"].encode(), scope["raw_path"], names, body)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(found))]})
    await send({"type": "http.response.body", "body": found})


@asynccontextmanager
async def served(app: Any, tls: tuple[Path, Path] | None = None, **limits: Any) -> AsyncIterator[uvicorn.Server]:
    connections = connection_class(FrontLimits(**limits))
    files: dict[str, Any] = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    config = uvicorn.Config(app, port=0, http=connections, ws="none", lifespan="off", log_config=None, **files)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        await serving


def connected(server: uvicorn.Server) -> socket.socket:
    return socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=20)


async def answer_after_a_pause() -> bytes:
    async with served(empty, header_timeout=HEADER_TIMEOUT) as server:
        with connected(server) as connection:
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            ours, theirs = socket.socketpair()
            blocked = asyncio.Event()

            def be_busy() -> None:
                connection.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
                time.sleep(HEADER_TIMEOUT + 0.2)  # timers come next, and only then sockets
                asyncio.get_running_loop().remove_reader(ours)
                blocked.set()

            with ours, theirs:
                asyncio.get_running_loop().add_reader(ours, be_busy)
                theirs.send(b".")
                await blocked.wait()
            return await asyncio.to_thread(connection.recv, 4096)


def test_headers_that_have_come_are_not_late() -> None:
    assert b" 200 " in uvloop.run(answer_after_a_pause())


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQA\r\n"


async def answers_to(*parts: bytes) -> bytes:
    """What a server says to bytes that come in these parts, with time between them."""

    def talk(connection: socket.socket) -> bytes:
        for part in parts:
            connection.sendall(part)
            time.sleep(0.05)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))

    async with served(echo) as server:
        with connected(server) as connection:
            return await asyncio.to_thread(talk, connection)


@pytest.mark.parametrize("cut", [0, 20, 70, 150])
def test_a_body_beside_an_offer_of_another_protocol_is_read(cut: int) -> None:
    """Java's own client offers HTTP/2 with each request."""
    offered = b"POST /a?b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n" + OFFER + b"\r\nhello"
    plain = b"POST /c HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nyo"
    chunked = b"POST /d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + OFFER + b"\r\n2\r\nhi\r\n0\r\n\r\n"
    sent = offered + plain + chunked
    found = uvloop.run(answers_to(sent[:cut], sent[cut:]))
    names = b"connection,http2-settings"
    assert b"POST /a [host,content-length,%b] hello;" % names in found
    assert b"POST /c [host,content-length] yo;" in found
    assert b"POST /d [host,transfer-encoding,%b] hi;" % names in found


@pytest.mark.parametrize("target", [b"/", b"localhost:80"])
def test_it_is_no_proxy(target: bytes) -> None:
    assert b" 400 " in uvloop.run(answers_to(b"CONNECT %b HTTP/1.1\r\nHost: x\r\n\r\n" % target))[:20]


async def answers_beside_another() -> tuple[bytes, bytes]:
    """Of one connection too many, and of the next one when a place is free again."""

    def talk(connection: socket.socket, *parts: bytes) -> bytes:
        for part in parts:
            time.sleep(0.1)  # as from a client that is far, or has much to do
            connection.sendall(part)
        return b"".join(iter(lambda: connection.recv(4096), b""))

    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    async with served(empty, max_connections=1) as server:
        first = connected(server)
        while not server.server_state.connections:
            await asyncio.sleep(0.01)
        with connected(server) as second:
            refused = await asyncio.to_thread(talk, second, head, b"{}")
            first.close()
            while server.server_state.connections:
                await asyncio.sleep(0.01)
            with connected(server) as third:
                return refused, await asyncio.to_thread(talk, third, head, b"{}")


def test_one_connection_too_many_gets_its_answer_while_it_still_sends() -> None:
    refused, taken = uvloop.run(answers_beside_another())
    assert b" 503 " in refused[:20]
    assert b"Too many connections" in refused
    assert b" 200 " in taken[:20]


async def seconds_of_silence(tls: tuple[Path, Path]) -> float:
    """Until a server ends a connection on which TLS never begins."""
    async with served(empty, tls) as server:
        with connected(server) as connection:
            began = time.monotonic()
            assert await asyncio.to_thread(connection.recv, 4096) == b""
            return time.monotonic() - began


def test_who_does_not_begin_tls_is_not_waited_for(tmp_path: Path) -> None:
    limits = FrontLimits(header_timeout=HEADER_TIMEOUT)
    tls = localhost_certificate(tmp_path)
    assert uvloop.run(seconds_of_silence(tls), loop_factory=loop_factory(limits)) < 10
