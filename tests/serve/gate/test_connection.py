"""A connection's times, where the front's process itself was kept from running."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
import uvloop

from penjing.serve.gate.config import FrontLimits
from penjing.serve.gate.connection import connection_class

HEADER_TIMEOUT = 0.3


async def empty(scope: dict[str, Any], receive: Any, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


async def answer_after_a_pause() -> bytes:
    connections = connection_class(FrontLimits(header_timeout=HEADER_TIMEOUT))
    config = uvicorn.Config(empty, port=0, http=connections, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        with socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=20) as connection:
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
            found = await asyncio.to_thread(connection.recv, 4096)
    finally:
        server.should_exit = True
        await serving
    return found


def test_headers_that_have_come_are_not_late() -> None:
    assert b" 200 " in uvloop.run(answer_after_a_pause())
