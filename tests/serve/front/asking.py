"""A client of the front that can also do what no good client does: it writes bytes to a socket."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import time
from contextlib import suppress
from typing import Any, NamedTuple

from tests.serve.triton.serving import Served

HEADER_TIMEOUT = 3.0
"""Of the tests' front, and for a body: forty clients in one process need a second where others compute beside them."""


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object; nothing of the server's inside is in it."""
        content = self.json
        assert list(content) == ["error"]
        assert list(content["error"]) == ["message", "type", "param", "code"]
        for inside in ("Traceback", "site-packages", "/tmp", "/root", "/home", "127.0.0.1"):
            assert inside not in content["error"]["message"]
        return content["error"]


class Asking:
    """A front, by its port; HTTPS with a `context`."""

    def __init__(self, port: int, context: ssl.SSLContext | None = None) -> None:
        self.port, self.context = port, context

    def ask(
        self,
        path: str,
        content: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
    ) -> Answer:
        """One request: `content` as JSON, or `raw` as it is."""
        body = raw if raw is not None else None if content is None else json.dumps(content).encode()
        sent = ({"content-type": "application/json"} if body is not None else {}) | (headers or {})
        if self.context is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        else:
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=60, context=self.context)
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def send(self, *parts: bytes, pause: float = 0.0) -> bytes:
        """Write bytes, with `pause` seconds after each part; what came until the server closed the connection."""
        found = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            # A server that closes before it has read all resets the connection, which may take its answer along.
            with suppress(ConnectionResetError, BrokenPipeError):
                for part in parts:
                    connection.sendall(part)
                    time.sleep(pause)
            with suppress(ConnectionResetError):
                while part := connection.recv(65536):
                    found += part
        return found

    def leave(self, request: bytes, seconds: float) -> None:
        """Send a request and go away after a while, whatever has come."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(request)
            time.sleep(seconds)


class Fronted(Asking):
    """A served model and its front."""

    def __init__(self, served: Served, context: ssl.SSLContext | None = None) -> None:
        assert served.config.front is not None
        super().__init__(served.config.front.port, context)
        self.served = served
        self.url = served.config.front.url
        self.model = served_name(served)


def served_name(served: Served) -> str:
    """What clients call the model."""
    state = served.state
    assert state is not None
    return state.model.rsplit("/", 1)[-1]
