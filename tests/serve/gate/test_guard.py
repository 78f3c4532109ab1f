"""How large a body may be, beside all others, and from where it may come: the guard alone, without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from penjing.serve.gate.config import FrontConfig, FrontLimits
from penjing.serve.gate.guard import Guard, Message

SMALL, LARGE = 2048, 8192


def guard_of(sees: bool, gate: asyncio.Event, begun: list[int]) -> Guard:
    async def app(scope: Message, receive: Any, send: Any) -> None:
        begun.append(len(scope["state"]["exchange"].body))
        await gate.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    limits = FrontLimits(max_body_bytes=SMALL, max_image_body_bytes=LARGE, max_held_bytes=2 * LARGE)
    return Guard(app, FrontConfig(port=1, limits=limits), lambda *_: None, lambda: sees)


async def asked(guard: Guard, size: int, origin: str | None = None) -> tuple[int, Any]:
    """Status and body of a request whose body comes in two parts."""
    parts, sent = [bytes(size // 2), bytes(size - size // 2)], list[Message]()

    async def receive() -> Message:
        if not parts:
            await asyncio.Event().wait()
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), *([] if origin is None else [(b"origin", origin.encode())])]
    scope = {"type": "http", "method": "POST", "path": "/v1/models", "headers": headers}
    await guard(scope, receive, send)
    return sent[0]["status"], sent[-1].get("body", b"")


def test_a_body_may_be_larger_where_a_model_sees() -> None:
    async def run() -> None:
        gate, begun = asyncio.Event(), list[int]()
        gate.set()
        for sees, size, status in (
            (False, SMALL, 200), (False, SMALL + 1, 413), (True, SMALL + 1, 200), (True, LARGE, 200),
            (True, LARGE + 1, 413),
        ):  # fmt: skip
            assert (await asked(guard_of(sees, gate, begun), size))[0] == status
        assert begun == [SMALL, SMALL + 1, LARGE]

    asyncio.run(run())


def test_large_bodies_have_so_much_memory_together_and_small_ones_always_pass() -> None:
    async def run() -> None:
        gate, begun = asyncio.Event(), list[int]()
        guard = guard_of(True, gate, begun)
        held = [asyncio.create_task(asked(guard, LARGE)) for _ in range(2)]
        while len(begun) < 2:
            await asyncio.sleep(0)
        status, body = await asked(guard, LARGE)
        assert status == 503
        assert "Large bodies of other requests" in json.loads(body)["error"]["message"]
        small = asyncio.create_task(asked(guard, SMALL))
        while len(begun) < 3:
            await asyncio.sleep(0)
        gate.set()
        assert [status for status, _ in await asyncio.gather(*held, small)] == [200] * 3
        assert (await asked(guard, LARGE))[0] == 200  # what was held is given back

    asyncio.run(run())


def answered(config: FrontConfig, method: str, **given: str) -> tuple[int, dict[str, str]]:
    """Status and headers of the answer to a request without a body."""

    async def app(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    sent, left = list[Message](), [b""]

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()]
    scope = {"type": "http", "method": method, "path": "/v1/models", "headers": headers}
    asyncio.run(Guard(app, config, lambda *_: None)(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_a_page_of_an_allowed_origin_may_send_what_its_client_library_sends() -> None:
    origin = "https://example.org"
    config = FrontConfig(port=8080, limits=FrontLimits(allowed_origins=(origin,)))
    asked = "authorization,anthropic-version,content-type,x-stainless-arch,x-stainless-retry-count"
    preflight = {"access_control_request_method": "POST", "access_control_request_headers": asked}
    status, headers = answered(config, "OPTIONS", host="localhost:8080", origin=origin, **preflight)
    assert (status, headers["access-control-allow-origin"]) == (204, origin)
    assert headers["access-control-allow-headers"] == asked
    status, headers = answered(config, "GET", host="localhost:8080", origin=origin)
    assert (status, headers["access-control-allow-origin"]) == (200, origin)
    assert headers["access-control-expose-headers"] == "retry-after, x-request-id"
    status, headers = answered(config, "OPTIONS", host="localhost:8080", origin="https://evil.example", **preflight)
    assert status == 403
    assert not any(name.startswith("access-control") for name in headers)


def test_a_front_on_loopback_answers_to_its_own_address_too() -> None:
    for host, name, status in (
        ("127.0.0.2", "127.0.0.2", 200), ("127.0.0.2", "localhost", 200), ("127.0.0.2", "127.0.0.3", 403),
        ("::1", "[::1]", 200), ("127.0.0.1", "127.0.0.2", 403),
    ):  # fmt: skip
        assert answered(FrontConfig(host=host, port=8080), "GET", host=f"{name}:8080")[0] == status


def test_limits_before_a_model_that_sees_hold_a_photo() -> None:
    limits = FrontLimits()
    assert limits.max_image_body_bytes > 20 * (1 << 20) * 4 / 3  # of EngineConfig.max_image_bytes, in base64
    assert limits.max_held_bytes >= 4 * limits.max_image_body_bytes


def test_an_origin_that_is_none_is_a_foreign_one() -> None:
    async def run() -> None:
        gate, begun = asyncio.Event(), list[int]()
        gate.set()
        guard = guard_of(False, gate, begun)
        for origin, status in (("http://localhost", 200), ("http://[x", 403), ("null", 403), ("", 403), ("//", 403)):
            found, body = await asked(guard, 2, origin)
            assert found == status
            assert status == 200 or json.loads(body)["error"]["code"] == "origin_not_allowed"

    asyncio.run(run())
