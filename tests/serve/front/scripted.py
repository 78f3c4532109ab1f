"""The whole front but its sockets, in this process, before a model whose words are given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from penjing.serve.client.wire_text import Chunk
from penjing.serve.gate.config import FrontConfig, FrontJob, FrontModel
from penjing.serve.site.app import Front
from tests.serve.front.asking import Answer


class Script:
    """A client of a model that says `pieces` and ends for a `reason`; an error among the pieces is raised."""

    def __init__(self) -> None:
        self.pieces: Sequence[str | Exception] = ()
        self.reason = "stop"
        self.asked: dict[str, Any] = {}
        """What the last request asked for."""

    async def stream(self, *_: Any, whole: bool, **asked: Any) -> AsyncGenerator[Chunk, None]:
        said, self.asked = "", asked
        for number, piece in enumerate(self.pieces, 1):
            if isinstance(piece, Exception):
                raise piece
            said += piece
            last = number == len(self.pieces)
            if last or not whole:
                text = said if whole else piece
                yield Chunk(text, self.reason if last else None, num_tokens=number if whole else 1, num_input_tokens=5)

    async def generate(self, *_: Any, **__: Any) -> None:
        pass

    async def close(self) -> None:
        pass


class ScriptedFront:
    """To be entered; `folder` is of the model "m", whose figures are at `metrics`."""

    def __init__(self, folder: Path = Path("nowhere"), metrics: str = "127.0.0.1:2") -> None:
        self._model = FrontModel(id="m", kind="llm", name="m", folder=folder, grpc="127.0.0.1:1", metrics=metrics)
        self._front = Front(FrontJob(front=FrontConfig(port=9999), models=(self._model,), log=Path("log")))
        self._runner = asyncio.Runner()
        self._open = AsyncExitStack()
        self.script = Script()

    def __enter__(self) -> Self:
        self._runner.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._open.aclose())
        self._runner.close()

    async def _begin(self) -> None:
        app: Any = self._front.guard.app
        await self._open.enter_async_context(app.router.lifespan_context(app))
        upstream = self._front.backend.upstream(self._model)
        await upstream.client.close()
        upstream.client = self.script  # type: ignore[assignment]
        upstream.alive()

    def ask(self, path: str, content: Any = None, *, raw: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        """One request: `content` as JSON, or `raw` as it is; a GET without both."""
        body = raw if content is None else json.dumps(content).encode()
        return self._runner.run(self._ask(path, body, headers or {}))

    async def _ask(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        unread, sent = [body], list[Any]()

        async def receive() -> Any:
            if not unread:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": unread.pop(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = {"host": "localhost:9999", "content-type": "application/json"} | headers
        scope = {
            "type": "http",
            "method": "POST" if body else "GET",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        await self._front.application(scope, receive, send)
        start, *parts = sent
        assert not parts[-1].get("more_body", False)
        given = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], given, b"".join(part.get("body", b"") for part in parts))

    def events(self, path: str, content: Any) -> list[Any]:
        """The objects of a stream."""
        lines = self.ask(path, content | {"stream": True}).body.splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
