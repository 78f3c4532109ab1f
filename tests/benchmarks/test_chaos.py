"""What the chaos script counts: answers, closed doors and silence, of servers that do just that."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from lib import chaos_fuzz
from lib.chaos_fuzz import Counts, exchange, front_bytes, fuzz, infer_bytes
from tritonclient.grpc import service_pb2


@contextmanager
def door(answer: bytes | None) -> Iterator[int]:
    """A port where each connection gets `answer` and is closed; None: it is kept, in silence."""
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if answer is not None:
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for connection in held:
            connection.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", {"answered": 1, "inside": 0}),
        (b"HTTP/1.1 500 x\r\n\r\nTraceback (most recent call last)", {"answered": 1, "inside": 1}),
        (b"", {"closed": 1, "inside": 0}),
        (None, {"hung": 1}),
    ],
)
def test_what_came_back_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, expected: dict[str, int]
) -> None:
    monkeypatch.setattr(chaos_fuzz, "ANSWER_SECONDS", 0.2)
    counts = Counts()
    with door(answer) as port:
        exchange(port, b"GET / HTTP/1.1\r\n\r\n", counts, 0.05)
    assert counts == expected


def test_the_same_requests_are_sent_every_time_and_all_are_counted() -> None:
    sent: list[bytes] = []

    def send(patient: object, draw: random.Random, counts: Counts) -> None:
        sent.append(front_bytes(draw, "m"))
        counts["answered"] += 1

    patient: object = None
    for _ in range(2):
        assert fuzz(patient, 40, send, threads=1)["answered"] == 40  # type: ignore[arg-type]
    assert sent[:40] == sent[40:]
    assert len(set(sent)) == 40


def test_protobufs_are_wrong_in_many_ways_and_some_can_be_read() -> None:
    messages: Any = service_pb2
    draw = random.Random(1)
    readable, names = 0, set()
    for _ in range(200):
        try:
            request = messages.ModelInferRequest.FromString(infer_bytes(draw))
        except Exception:
            continue
        readable += 1
        names.add(request.model_name)
    assert 120 < readable < 200
    assert {"", "llm", "x"} <= names
