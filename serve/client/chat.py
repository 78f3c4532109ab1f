"""`penjing chat`: a conversation with a served model in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from penjing.core.errors import OverloadedError, PenjingError, RequestError, ServerError
from penjing.serve.client.client import Client
from penjing.serve.client.protocol import DECODER

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C cancels an answer"


def chat(
    server: str = "localhost:8001",
    *,
    system: str | None = None,
    max_tokens: int = 512,
    temperature: float = 0.7,
    model: str | None = None,
    images: Sequence[bytes] = (),
    source: TextIO | None = None,
    sink: TextIO | None = None,
) -> None:
    """Talk with the model at `server`; it applies its own chat template. `images` come before the first message.

    Reads a message a line from `source` (standard input) and writes the answers to `sink` (standard output) as they
    come. Without a terminal there are no prompts, and the first failure ends the program.

    Raises:
        ServerError: no server, or (without a terminal) a failure in it.
        RequestError, OverloadedError: without a terminal: the server refuses a message.
    """
    lines: TextIO = source or sys.stdin
    answers: TextIO = sink or sys.stdout
    interactive = lines.isatty()
    with Client(server, model=model) as client:
        if not client.is_ready(timeout=5.0):
            raise ServerError(
                f"no model {model or DECODER!r} answers at {server}; start one with 'penjing serve MODEL', or take one "
                "that runs: 'penjing server status' shows names (--model) and gRPC ports (--server)"
            )
        if interactive:
            print(HELP, file=sys.stderr)
        sampling = {"max_tokens": max_tokens, "temperature": temperature}
        conversation = Conversation(client, system, sampling, answers, images)
        while (message := _read(lines, interactive)) is not None:
            if message == "/exit":
                return
            if message == "/reset":
                conversation.reset()
                if interactive:
                    print("(a new conversation)", file=sys.stderr)
            elif message.startswith("/") and interactive:
                print(HELP, file=sys.stderr)
            elif message:
                try:
                    conversation.say(message)
                except (RequestError, OverloadedError, ServerError) as error:
                    if not interactive:
                        raise
                    print(f"error: {error}", file=sys.stderr)


class Conversation:
    """The messages so far. An exchange that failed is forgotten; one that was cancelled keeps what had come."""

    def __init__(
        self,
        client: Client,
        system: str | None,
        sampling: dict[str, Any],
        sink: TextIO,
        images: Sequence[bytes] = (),
    ) -> None:
        self._client, self._sampling, self._sink, self._images = client, sampling, sink, list(images)
        self._start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages = list(self._start)

    def say(self, message: str) -> str:
        """Send a message and print the answer as it comes; Ctrl-C cancels it. Returns the answer."""
        content: Any = message
        if self._images and self.messages == self._start:
            content = [*({"type": "image"} for _ in self._images), {"type": "text", "text": message}]
        asked = [*self.messages, {"role": "user", "content": content}]
        sampling: dict[str, Any] = self._sampling | ({"images": self._images} if self._images else {})
        stream = self._client.stream(messages=asked, **sampling)
        try:
            with contextlib.suppress(KeyboardInterrupt), stream:
                for chunk in stream:
                    self._sink.write(chunk.text)
                    self._sink.flush()
        except PenjingError:
            self._sink.write("\n")
            raise
        self._sink.write("\n")
        self._sink.flush()
        answer = stream.result.text
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer


def _read(source: TextIO, interactive: bool) -> str | None:
    """The next message; None at the end of the input."""
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing and history for input())
    while True:
        try:
            line = input("> ") if interactive else source.readline()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)", file=sys.stderr)
            continue
        return line.strip() if line or interactive else None
