"""What the chaos script counts: answers, closed doors and silence, of servers that do just that."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lib import chaos_clock, chaos_fuzz, chaos_soak
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


def test_pieces_are_other_requests_and_the_same_every_time() -> None:
    def sent(piece: int) -> list[int]:
        drawn: list[int] = []
        patient: Any = None
        counts = fuzz(patient, 8, lambda _, draw, __: drawn.append(draw.randrange(10**9)), threads=2, piece=piece)
        assert not counts
        return sorted(drawn)

    assert sent(0) == sent(0)
    assert sent(1) == sent(1)
    assert not {*sent(0), *sent(1)} & {*sent(2)}


class Quick:
    """A patient that is asked, and grows by a byte at each look."""

    address = "nowhere"
    looks = 0

    def memory(self) -> int:
        self.looks += 1
        return 1000 + self.looks

    def figures(self) -> dict[str, float]:
        return {"num_requests_running": 0.0}


class QuickClient:
    """Its answers are one token short every third time."""

    asked = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> QuickClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def generate(self, prompt: str, *, max_tokens: int, **_: Any) -> Any:
        assert prompt
        type(self).asked += 1
        return SimpleNamespace(num_output_tokens=max_tokens - (self.asked % 3 == 0))


def test_a_long_load_counts_what_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_soak, "Client", QuickClient)
    monkeypatch.setattr(chaos_soak, "LOOK_SECONDS", 0.05)
    patient: Any = Quick()
    soaked = chaos_soak.soak(patient, 0.4, 5000.0, seed=1)
    total = sum(soaked.ends.values())
    assert total == QuickClient.asked > 5
    assert abs(soaked.ends["short"] - total / 3) <= 1
    assert soaked.tokens > 0
    assert len(soaked.memory) >= 3


def test_no_random_field_asks_for_a_long_answer() -> None:
    draw = random.Random(0)
    asked = [field["max_tokens"] for _ in range(5000) if "max_tokens" in (field := chaos_fuzz.wrong_field(draw))]
    assert asked
    assert all(value is not None and not (isinstance(value, int | float) and value > 1) for value in asked)


def test_what_is_started_has_the_time_of_day_of_a_file_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library is another's: here only that what starts inside gets it, and what starts after does not."""
    peer = tmp_path / "build" / "peers" / "libfaketime"
    library = peer / chaos_clock.LIBRARY.replace("*", "3.11")
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(chaos_clock, "ROOT", tmp_path)
    monkeypatch.setattr(chaos_clock, "SCRIPT", tmp_path / "script.sh")
    (tmp_path / "script.sh").touch()
    before = dict(os.environ)
    with chaos_clock.faked_clock() as file:
        assert file.read_text() == "+0"
        assert os.environ["LD_PRELOAD"] == f"{peer / 'timed_locks.so'}:{library}"
        assert os.environ["FAKETIME_TIMESTAMP_FILE"] == str(file)
    assert dict(os.environ) == before
    assert sum(chaos_clock.OFFSETS) == 0
    assert chaos_clock.OFFSETS[-1] == 0
