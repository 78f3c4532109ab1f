"""Clients that stream all the while, and clients that leave, dawdle or never read."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from contextlib import suppress

from lib.chaos_server import Patient
from penjing.core.errors import PenjingError
from penjing.serve.client.client import Client

STREAMS, TOKENS = 6, 48
HUNG_SECONDS = 90.0
FIRST_SECONDS = 60.0


class Load:
    """Streams by gRPC and by HTTP, one after the other in each thread, until they are told to stop.

    `ends` counts how they ended: complete, broken (an error, or a connection that ended before the answer did), short
    (an answer that says that it is complete, with fewer tokens), hung.
    """

    def __init__(self, patient: Patient) -> None:
        self.patient = patient
        self.ends: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(kind,), daemon=True)
            for kind in (self._by_grpc, self._by_http)
            for _ in range(STREAMS // 2)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(HUNG_SECONDS + 10)
            self.ends["hung"] += thread.is_alive()

    def _run(self, ask) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            end = ask()
            self.ends["hung" if time.monotonic() - started > HUNG_SECONDS else end] += 1
            if end == "broken":
                time.sleep(0.2)

    def _by_grpc(self) -> str:
        try:
            with Client(self.patient.address, timeout=HUNG_SECONDS, retries=0) as client:
                result = client.generate("A story of a tree:", max_tokens=TOKENS, ignore_eos=True)
        except PenjingError:
            return "broken"
        return "complete" if result.num_output_tokens == TOKENS else "short"

    def _by_http(self) -> str:
        body = {"model": self.patient.model, "prompt": "A story of a tree:", "max_tokens": TOKENS, "stream": True}
        body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
        try:
            with http_stream(self.patient, body) as connection:
                connection.settimeout(HUNG_SECONDS)
                received = b""
                while piece := connection.recv(65536):
                    received += piece
        except OSError:
            return "broken"
        if b"data: [DONE]" not in received or b'"error"' in received:
            return "broken"
        return "complete" if f'"completion_tokens":{TOKENS}' in received.decode().replace(" ", "") else "short"


def http_stream(patient: Patient, body: dict[str, object]) -> socket.socket:
    """A connection to the front on which a completion has been asked for."""
    connection = socket.create_connection(("127.0.0.1", patient.front_port), timeout=FIRST_SECONDS)
    connection.sendall(http_request(body))
    return connection


def http_request(body: dict[str, object]) -> bytes:
    """The bytes that ask for a completion, after which the front closes the connection."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def leave(patient: Patient, count: int, threads: int = 16) -> int:
    """`count` streams whose clients go after the first piece, half by gRPC and half by HTTP; how many got so far."""
    numbers = iter(range(count))
    lock, left = threading.Lock(), [0]

    def run() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            with suppress(PenjingError, OSError, StopIteration):
                if number % 2:
                    with Client(patient.address, timeout=FIRST_SECONDS, retries=20) as client:
                        stream = client.stream(f"left {number}", max_tokens=400, ignore_eos=True)
                        next(stream)
                        stream.close()
                else:
                    body = {"model": patient.model, "prompt": f"left {number}", "max_tokens": 400, "stream": True}
                    with http_stream(patient, body) as connection:
                        received = b""
                        while b"data: " not in received and (piece := connection.recv(4096)):
                            received += piece
                        assert b"data: " in received
                with lock:
                    left[0] += 1

    workers = [threading.Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return left[0]


def dawdle(patient: Patient, writers: int, readers: int) -> float:
    """Clients that send a byte a second, and others that never read; seconds that one good answer takes beside them."""
    held: list[socket.socket] = []
    try:
        for _ in range(writers):
            held.append(socket.create_connection(("127.0.0.1", patient.front_port), timeout=10))
            held[-1].sendall(b"POST /v1/completions HTTP/1.1\r\n")
        body = {"model": patient.model, "prompt": "a", "max_tokens": 64, "stream": True}
        held += [http_stream(patient, body) for _ in range(readers)]
        for _ in range(3):
            for connection in held[:writers]:
                with suppress(OSError):
                    connection.sendall(b"x")
            time.sleep(1)
        started = time.monotonic()
        body = {"model": patient.model, "prompt": "a", "max_tokens": 1}
        with http_stream(patient, body) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        return time.monotonic() - started
    finally:
        for connection in held:
            connection.close()
