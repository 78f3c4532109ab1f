"""What the front lets in, over a real socket: sources, sizes, times, forms."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

from tests.serve.front.asking import Fronted

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("front")]
WHOLE = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"


def test_models_and_health(front: Fronted) -> None:
    assert front.ask("/health/live").json == {"status": "live"}
    listed = front.ask("/v1/models").json
    assert [model["id"] for model in listed["data"]] == [front.model]
    assert front.ask(f"/v1/models/{front.model}").json == listed["data"][0]
    assert front.ask("/v1/models/other").error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/nothing", "GET", 404), ("/v1/models", "POST", 405), ("/v1/models", "DELETE", 405)]
)
def test_paths_and_methods(front: Fronted, path: str, method: str, status: int) -> None:
    answer = front.ask(path, method=method)
    assert answer.status == status
    assert answer.error["type"] in ("not_found_error", "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/models/", "did you mean /v1/models?"),
        ("/v1/chat/completions/", "did you mean /v1/chat/completions?"),
        ("/v1//chat/completions", "did you mean /v1/chat/completions?"),
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/tokenize", "did you mean /tokenize?"),
        ("/v1/completion", "did you mean /v1/completions?"),
        ("/v1", "/openapi.json lists the paths."),
        ("/" + "é" * 300, "/openapi.json lists the paths."),
    ],
)
def test_a_path_that_is_not_there_names_the_one_that_was_meant(front: Fronted, path: str, hint: str) -> None:
    answer = front.ask(quote(path))
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert answer.error["message"].endswith(f" here; {hint}")


def test_a_web_page_cannot_call_a_local_server(front: Fronted) -> None:
    assert front.ask("/v1/models", headers={"host": f"evil.example:{front.port}"}).status == 403
    assert front.ask("/v1/models", headers={"origin": "https://evil.example"}).status == 403
    assert front.ask("/v1/models", headers={"origin": "null"}).status == 403
    own = f"http://localhost:{front.port}"
    assert front.ask("/v1/models", headers={"origin": own, "host": f"localhost:{front.port}"}).status == 200
    assert front.ask("/health/live", headers={"host": "10.0.0.7:8080"}).status == 200  # a kubelet's probe


def test_a_body_over_the_limit_is_refused_before_it_comes(front: Fronted) -> None:
    head = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50000000\r\n\r\n"
    assert b" 413 " in front.send(head)[:20]
    chunked = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    endless = front.send(chunked, *[b"10000\r\n" + bytes(65536) + b"\r\n"] * 1000)
    assert endless[8:13] in (b" 413 ", b"")
    assert front.ask("/v1/models", raw=b"x", headers={"content-encoding": "gzip"}).status == 415


def test_one_byte_chunks_cost_nothing(front: Fronted) -> None:
    head = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    started = time.monotonic()
    answer = front.send(head, b"1\r\na\r\n" * 200_000, b"0\r\n\r\n")
    assert b" 405 " in answer[:20]
    assert time.monotonic() - started < 20


def test_headers_too_many_or_too_slow(front: Fronted) -> None:
    start = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
    assert front.send(start, *[b"x: " + b"y" * 4000 + b"\r\n"] * 12)[8:13] == b" 431 "
    assert front.send(start + b"x: ", b"y" * 40_000)[8:13] == b" 431 "
    body = b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n12345"
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(front.send, b"GET /v1/models HTTP/1.1\r\nhost: loc")
        silent = pool.submit(front.send)
        second = pool.submit(front.send, WHOLE, b"GET /v1/mo", pause=0.2)
        short = pool.submit(front.send, body)
    assert b" 408 " in begun.result()[:20]
    assert silent.result() == b""
    assert b" 408 " in second.result().split(b"owned_by")[-1]
    assert b" 408 " in short.result()[:20]


@pytest.mark.parametrize(
    "junk", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\0" * 100, b"GET / HTTP/1.1\r\nbad header\r\n\r\n"]
)
def test_what_is_no_http(front: Fronted, junk: bytes) -> None:
    assert b" 400 " in front.send(junk + b"\r\n\r\n")[:20]
    assert front.ask("/health/live").status == 200


def test_a_client_that_leaves_early_leaves_nothing(front: Fronted) -> None:
    for _ in range(50):
        connection = socket.create_connection(("127.0.0.1", front.port))
        connection.sendall(b"POST /v1/models HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n1")
        connection.close()
    assert front.ask("/health/live").status == 200
