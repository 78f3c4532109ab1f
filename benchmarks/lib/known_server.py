"""A server whose times are known, so that what two load generators say of it can be held to the truth.

    python -m lib.known_server          # prints its port

An answer of n tokens has the first after FIRST seconds and each further one GAP seconds after the one before, by the
clock and not by when the last was written, so that a server that is held up does not drift.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penjing.serve.bench.load import Asked

FIRST, GAP = 0.2, 0.02
MODEL = "known"


@contextmanager
def known_server() -> Iterator[str]:
    """host:port of one in a process of its own."""
    command = [sys.executable, "-m", "lib.known_server"]
    with subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None, "asked for"
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def known_figures(load: Sequence[Asked]) -> dict[str, float]:
    """What is true of `load`, in the words of `penjing bench server`."""
    lengths = [asked.max_tokens for asked in load]
    whole = [FIRST + GAP * (length - 1) for length in lengths]
    span = max(asked.at + seconds for asked, seconds in zip(load, whole, strict=True)) - load[0].at
    return {
        "first_token_p50": 1000 * FIRST,
        "first_token_p90": 1000 * FIRST,
        "per_token_p50": 1000 * GAP,
        "whole_answer_p50": 1000 * float(np.median(whole)),
        "requests_per_second": len(load) / span,
        "tokens_per_second": sum(lengths) / span,
    }


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        started = time.monotonic()
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
        if head.startswith(b"POST /v1/chat/completions "):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
            await _stream(writer, json.loads(body)["max_tokens"], started)
        elif head.startswith(b"GET /v1/models "):
            text = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + text)
        else:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
    except (OSError, asyncio.IncompleteReadError):  # a client that has gone
        return
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, tokens: int, started: float) -> None:
    role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    _send(writer, [role])
    for index in range(tokens):
        await asyncio.sleep(started + FIRST + GAP * index - time.monotonic())
        end = "length" if index == tokens - 1 else None
        _send(writer, [{"index": 0, "delta": {"content": " word"}, "finish_reason": end}])
    _send(writer, [], {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens})
    writer.write(b"data: [DONE]\n\n")


def _send(writer: asyncio.StreamWriter, choices: list[dict[str, object]], usage: dict[str, int] | None = None) -> None:
    chunk = {"id": "a", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": choices}
    writer.write(f"data: {json.dumps(chunk | ({'usage': usage} if usage else {}))}\n\n".encode())


async def _main() -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
