"""The terminal chat, with a client that answers by rote."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest

from penjing.core.errors import OverloadedError, ServerError
from penjing.serve.client import chat as chat_module
from penjing.serve.client.wire_text import Chunk, Result


class Rote:
    """A `Client` that answers with the number of messages and the last of them."""

    asked: list[list[dict[str, str]]]
    ready = True
    fail_on = ""
    interrupt_after: int | None = None

    def __init__(self, server: str, *, model: str | None) -> None:
        assert (server, model) == ("localhost:1", None)
        type(self).asked = []

    def __enter__(self) -> Rote:
        return self

    def __exit__(self, *_: object) -> None: ...

    def is_ready(self, timeout: float) -> bool:
        return self.ready

    def stream(self, *, messages: list[dict[str, str]], **sampling: Any) -> RoteStream:
        self.asked.append([dict(message) for message in messages])
        if self.fail_on and self.fail_on in messages[-1]["content"]:
            raise OverloadedError("too much to do")
        return RoteStream([f"{len(messages)}", ":", messages[-1]["content"]], self.interrupt_after)


class RoteStream:
    def __init__(self, pieces: list[str], interrupt_after: int | None) -> None:
        self.pieces, self.interrupt_after = pieces, interrupt_after
        self.sent: list[Chunk] = []
        self.closed = False

    @property
    def result(self) -> Result:
        return Result.of(self.sent)

    def __enter__(self) -> RoteStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def __iter__(self) -> Iterator[Chunk]:
        for index, piece in enumerate(self.pieces):
            if index == self.interrupt_after:
                raise KeyboardInterrupt
            self.sent.append(Chunk(piece))
            yield self.sent[-1]


@pytest.fixture(autouse=True)
def rote(monkeypatch: pytest.MonkeyPatch) -> type[Rote]:
    kind = type("Rote", (Rote,), {})
    monkeypatch.setattr(chat_module, "Client", kind)
    return kind


def talk(text: str, **options: Any) -> str:
    sink = io.StringIO()
    chat_module.chat("localhost:1", source=io.StringIO(text), sink=sink, **options)
    return sink.getvalue()


def test_a_conversation_is_remembered_until_reset(rote: type[Rote]) -> None:
    assert talk("one\n\ntwo\n/reset\nthree\n/exit\nfour\n", system="be brief") == "2:one\n4:two\n2:three\n"
    assert rote.asked[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "2:one"},
        {"role": "user", "content": "two"},
    ]
    assert talk("no newline at the end") == "1:no newline at the end\n"


def test_an_interrupt_cancels_the_answer_and_not_the_program(rote: type[Rote]) -> None:
    rote.interrupt_after = 1
    assert talk("one\ntwo\n") == "1\n3\n"
    assert rote.asked[1][1] == {"role": "assistant", "content": "1"}  # what had come


def test_a_failure_ends_a_piped_chat(rote: type[Rote]) -> None:
    rote.fail_on = "bad"
    with pytest.raises(OverloadedError, match="too much"):
        talk("good\nbad\nnever\n")
    assert len(rote.asked) == 2
    rote.ready = False
    with pytest.raises(
        ServerError, match=r"no model 'llm' answers at localhost:1; .* names \(--model\) and gRPC ports"
    ):
        talk("hi\n")


def test_at_a_terminal_a_failure_is_shown_and_forgotten(
    rote: type[Rote], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = ["good", KeyboardInterrupt, "bad", "/help", "again", EOFError]

    def read(prompt: str) -> str:
        line = lines.pop(0)
        if not isinstance(line, str):
            raise line
        return line

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    rote.fail_on = "bad"
    monkeypatch.setattr("builtins.input", read)
    sink = io.StringIO()
    chat_module.chat("localhost:1", source=Terminal(), sink=sink)
    assert sink.getvalue() == "1:good\n3:again\n"
    shown = capsys.readouterr().err
    assert "error: too much to do" in shown
    assert shown.count(chat_module.HELP) == 2
