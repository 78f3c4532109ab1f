"""Bodies, headers and protobufs that nobody should send, to every port: what came back is counted."""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from lib.chaos_server import Patient
from lib.models import say

ANSWER_SECONDS = 45.0  # longer than any patience of the front
MOMENT = 0.3
INSIDE = (b"Traceback", b"site-packages", b"/root/", b"/home/")
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/x", "/health/ready", "/")
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 1e308, -0.0, "", "\x00", "\ud800", "a" * 5000, [], {}, [[]], [0] * 300,
    {"a": {}},
    "ignore", [None], [{"role": "user", "content": "x"}], [{"role": 3}], {"type": "json_object"}, [["a"], ["b"]],
)  # fmt: skip
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "stream", "stop", "logprobs", "seed"),
    *("echo", "logit_bias", "response_format", "tools", "tool_choice", "stream_options", "user", "text", "tokens"),
    "nonsense",
)
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "PRI", "get", "P\x00ST", "")


class Counts(Counter[str]):
    """answered, closed (the connection was ended without an answer), hung, inside (an answer shows what is within)."""


def wrong_field(draw: random.Random) -> dict[str, Any]:
    """A field and a value, which may be right; it never asks for an answer that takes long."""
    name, value = draw.choice(FIELDS), draw.choice(VALUES)
    # None asks for all that the context has room for: a minute on a machine that is busy.
    lasting = name == "max_tokens" and (value is None or (isinstance(value, int | float) and value > 1))
    return {name: -1 if lasting else value}


def front_bytes(draw: random.Random, model: str) -> bytes:
    """A request to the front: a wrong field or two, or wrong HTTP."""
    body: Any = {"model": model, "prompt": "a", "max_tokens": 1}
    for _ in range(draw.randint(1, 3)):
        body |= wrong_field(draw)
    content = json.dumps(body).encode()
    kind = draw.randrange(8)
    if kind == 0:
        content = draw.randbytes(draw.choice([0, 1, 40, 4000]))
    elif kind == 1:
        at = draw.randrange(len(content))
        content = content[:at] + draw.randbytes(draw.randint(1, 4)) + content[at + 1 :]
    elif kind == 2:
        content = b"[" * draw.choice([100, 5000, 100_000])
    return http_bytes(draw, draw.choice(PATHS), content, harmless=kind > 3)


def http_bytes(draw: random.Random, path: str, content: bytes, harmless: bool) -> bytes:
    """A request of HTTP/1.1, with wrong headers unless it is to be `harmless`."""
    headers = ["Host: localhost", "Content-Type: application/json", "Connection: close"]
    length, method, version = str(len(content)), "POST", "HTTP/1.1"
    if not harmless:
        for _ in range(draw.randint(1, 2)):
            kind = draw.randrange(8)
            if kind == 0:
                length = draw.choice(["-1", "0", "99999999999999999999", "x", "1, 2", str(len(content) + 5), ""])
            elif kind == 1:
                method = draw.choice(METHODS)
            elif kind == 2:
                version = draw.choice(["HTTP/1.0", "HTTP/2.0", "HTTP/9", "", "HTTP/1.1\x00"])
            elif kind == 3:
                headers.append("X" * draw.choice([1, 300, 40_000]) + ": y")
            elif kind == 4:
                headers.append(
                    draw.choice(["Transfer-Encoding: chunked", "Content-Encoding: gzip", "Expect: 100-continue"])
                )
            elif kind == 5:
                headers[0] = draw.choice(["Host: evil.example", "Host:", "Host: a\x00b", "NoHost: 1"])
            elif kind == 6:
                headers.append(draw.choice(["Origin: https://evil.example", "Upgrade: websocket", ": empty", "a b: c"]))
            else:
                path = draw.choice(
                    ["*", "//", "/%00", "/%ff%fe", "/../../etc/passwd", "/" + "a" * 9000, "http://x/", ""]
                )
    lines = [f"{method} {path} {version}", *headers, f"Content-Length: {length}", "", ""]
    return "\r\n".join(lines).encode("latin-1", "replace") + content


def exchange(port: int, data: bytes, counts: Counts, moment: float = MOMENT) -> None:
    """Send, say after a moment that nothing follows, and read to the end."""
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
        received = b""
        try:
            connection.sendall(data)
            if moment == 0 or not select.select([connection], [], [], moment)[0]:  # it waits for the rest of a body
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                received += piece
        except TimeoutError:
            counts["hung"] += 1
            say(f"no answer within {ANSWER_SECONDS:.0f} s to {data[:600]!r}, but {received[:100]!r}")
            return
        except OSError:
            pass  # it was closed in our face, which is an answer too
    counts["answered" if received else "closed"] += 1
    counts["inside"] += any(word in received for word in INSIDE)


def fuzz_front(patient: Patient, draw: random.Random, counts: Counts) -> None:
    exchange(patient.front_port, front_bytes(draw, patient.model), counts)


def fuzz_metrics(patient: Patient, draw: random.Random, counts: Counts) -> None:
    content = draw.randbytes(draw.choice([0, 1, 3000]))
    data = http_bytes(draw, draw.choice(["/metrics", *PATHS]), content, False)
    data = data.replace(b"Expect: 100-continue\r\n", b"")  # it then waits without an end: docs/limits.md
    exchange(patient.config.metrics_port, data, counts)


def fuzz_http2(patient: Patient, draw: random.Random, counts: Counts) -> None:
    """Bytes to gRPC's port: HTTP/1, noise, or a preface and frames of any kind."""
    kind = draw.randrange(3)
    if kind == 0:
        data = http_bytes(draw, "/inference.GRPCInferenceService/ModelInfer", draw.randbytes(30), False)
    elif kind == 1:
        data = draw.randbytes(draw.choice([1, 24, 500]))
    else:
        data = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00\x00\x00\x00\x00"
        for _ in range(draw.randint(1, 6)):
            payload = draw.randbytes(draw.choice([0, 4, 8, 60]))
            length = len(payload) if draw.random() < 0.8 else draw.randrange(1 << 24)
            data += struct.pack(">I", length)[1:] + bytes([draw.randrange(12), draw.randrange(256)])
            data += struct.pack(">I", draw.choice([0, 1, 3, 2**31 - 1])) + payload
    exchange(patient.config.grpc_port, data, counts, 0.0)  # else the server waits for a handshake


class GrpcFuzz:
    """Protobufs with wrong tensors, or bytes that are none, over one channel."""

    def __init__(self, address: str) -> None:
        import grpc

        self._errors = grpc.RpcError
        self._deadline = grpc.StatusCode.DEADLINE_EXCEEDED
        self._channel = grpc.insecure_channel(address)
        service = "/inference.GRPCInferenceService/"
        self._stream = self._channel.stream_stream(f"{service}ModelStreamInfer")
        self._unary = [
            self._channel.unary_unary(service + name) for name in ("ModelInfer", "ModelConfig", "RepositoryIndex")
        ]

    def __call__(self, patient: Patient, draw: random.Random, counts: Counts) -> None:
        data = infer_bytes(draw)
        try:
            if draw.random() < 0.7:
                received = b"".join(bytes(message) for message in self._stream(iter([data]), timeout=ANSWER_SECONDS))
            else:
                received = bytes(draw.choice(self._unary)(data, timeout=ANSWER_SECONDS))
        except self._errors as error:
            if error.code() is self._deadline:  # type: ignore[attr-defined]
                counts["hung"] += 1
                say(f"no answer within {ANSWER_SECONDS:.0f} s to the protobuf {data[:2000]!r}")
                return
            received = str(error.details()).encode()  # type: ignore[attr-defined]
        counts["answered"] += 1
        counts["inside"] += any(word in received for word in INSIDE)


def infer_bytes(draw: random.Random) -> bytes:
    """A ModelInferRequest that is wrong somewhere."""
    from penjing.serve.client.wire_text import build_request

    sampling = {"max_tokens": 1} | wrong_field(draw)
    sampling = {name: "" if value == "\ud800" else value for name, value in sampling.items()}
    request = build_request("llm", "a", None, sampling, stream=draw.random() < 0.5)
    for _ in range(draw.randint(0, 3)):
        index, kind = draw.randrange(len(request.inputs)), draw.randrange(6)
        if kind == 0:
            request.raw_input_contents[index] = draw.randbytes(draw.choice([0, 1, 4, 5, 40, 3000]))
        elif kind == 1:
            request.inputs[index].datatype = draw.choice(["BYTES", "BOOL", "FP32", "INT64", "XYZ", ""])
        elif kind == 2:
            request.inputs[index].shape[:] = [draw.choice([-1, 0, 1, 2, 2**40]) for _ in range(draw.randint(0, 3))]
        elif kind == 3:
            request.inputs[index].name = draw.choice(["text_input", "messages", "stream", "nothing", ""])
        elif kind == 4:
            request.model_name = draw.choice(["", "llm", "x", "../llm"])
        else:
            request.raw_input_contents.append(draw.randbytes(8))
    data = bytearray(request.SerializeToString())
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 6)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def fuzz(
    patient: Patient,
    count: int,
    send: Callable[[Patient, random.Random, Counts], None],
    threads: int = 4,
    piece: int = 0,
) -> Counts:
    """`count` requests by `send`; the same ones every time, and other ones in each `piece`."""
    every = [Counts() for _ in range(threads)]

    def run(number: int) -> None:
        draw = random.Random(number if piece == 0 else f"{piece} {number}")
        for _ in range(count // threads):
            try:
                send(patient, draw, every[number])
            except OSError:
                every[number]["refused"] += 1  # no connection: nobody listens

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    total = Counts()
    for counts in every:
        total.update(counts)
    return total
