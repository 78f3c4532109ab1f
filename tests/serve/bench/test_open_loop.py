"""A load that does not wait for answers: its times, its figures against numpy's, and what it sends."""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penjing.core.errors import ConfigError, InputError, ServerError, UnavailableError
from penjing.serve import cli
from penjing.serve.bench.intervals import percentiles
from penjing.serve.bench.load import BURST, Asked, make_load
from penjing.serve.bench.load_page import load_page, write_load_page
from penjing.serve.bench.open_loop import Address, Outcome, bench_open_loop, load_figures
from tests.serve.certificates import localhost_certificate
from tests.serve.triton.serving import free_ports

GOALS = (1.0, 0.1)
TLS_HANDSHAKE = b"\x16"


def outcome(at: float, arrivals: list[float], tokens: int = 3, status: int = 200, asked: int = 3) -> Outcome:
    return Outcome(Asked(at, (), asked), status, tokens, arrivals, end=arrivals[-1] if arrivals else 0.1)


class Door:
    """Answers as the front does, but only when so many requests have come."""

    def __init__(self, wait_for: int, status: int = 200, breaks: bool = False, refusal: Any = None) -> None:
        self.bodies: list[Any] = []
        self._refusal = refusal
        self._wait_for, self._status, self._breaks = wait_for, status, breaks

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readexactly(1)
        if head == TLS_HANDSHAKE:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()
            return
        head += await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        body = await reader.readexactly(int(length[1]))
        refuses = self._refusal is not None and head.startswith(b"POST ")
        writer.write(b"HTTP/1.1 %d X\r\n\r\n" % (400 if refuses else self._status))
        if refuses:
            writer.write(json.dumps(self._refusal).encode())
        elif head.startswith(b"GET /v1/models "):
            writer.write(b'{"data": [{"id": "tiny"}, {"id": "tiny:2"}]}')
        else:
            asked = json.loads(body)
            self.bodies.append(asked)
            if len(self.bodies) == self._wait_for:
                self._all_there.set()
            await self._all_there.wait()
            usage = {"completion_tokens": asked["max_tokens"]}
            for event in ({"choices": [{"delta": {"content": "a"}}]}, {"choices": [], "usage": usage}):
                written = b"data: " + json.dumps(event).encode() + b"\n\n"
                if self._breaks and event["choices"] and len(self.bodies) % 2:
                    writer.write(written + written[:-9])
                    return writer.close()
                writer.write(written)
            writer.write(b"data: [DONE]\n\n")
        writer.close()

    async def serve(
        self, port: int, started: threading.Event, ended: threading.Event, context: ssl.SSLContext | None
    ) -> None:
        self._all_there = asyncio.Event()
        async with await asyncio.start_server(self.answer, "127.0.0.1", port, ssl=context):
            started.set()
            await asyncio.to_thread(ended.wait)


@contextmanager
def open_door(door: Door, context: ssl.SSLContext | None = None) -> Iterator[str]:
    """Its address; it speaks TLS with a `context`."""
    (port,), started, ended = free_ports(1), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(door.serve(port, started, ended, context)))
    thread.start()
    try:
        assert started.wait(60)
        yield f"127.0.0.1:{port}"
    finally:
        ended.set()
        thread.join(60)


def test_arrivals_are_a_poisson_process() -> None:
    at = np.array([asked.at for asked in make_load("chat", 20, 500, seed=1)])
    gaps = np.diff(at)
    assert len(at) == pytest.approx(10_000, rel=0.05)
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(gaps.std(), rel=0.05)  # as of an exponential distribution
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 20, rel=0.05)
    assert [asked.at for asked in make_load("chat", 20, 5)] == [asked.at for asked in make_load("chat", 20, 5)]


def test_scenarios_ask_for_what_they_say() -> None:
    bursts = make_load("burst", 40, 50)
    assert set(Counter(asked.at for asked in bursts).values()) == {BURST}
    assert len(bursts) == pytest.approx(2000, rel=0.2)
    shared = make_load("shared-prefix", 10, 10)
    assert len({asked.messages[0] for asked in shared}) == 1
    assert len({asked.messages[1] for asked in shared}) == len(shared)
    lengths = [len(asked.messages[-1][1].split()) for asked in make_load("long-prompt", 10, 10)]
    assert [length == 800 for length in lengths] == [index % 4 == 0 for index in range(len(lengths))]


def test_percentiles_are_numpys() -> None:
    draw = np.random.default_rng(0)
    for count in (1, 2, 99, 100, 101):
        values = draw.exponential(size=count)
        for share, found in ((share, percentiles(values.tolist())[f"p{share}"]) for share in (50, 90, 99)):
            assert found == 1000 * np.percentile(values, share, method="inverted_cdf")
    assert percentiles([]) == {}


def test_figures_count_everybody_and_time_the_complete() -> None:
    outcomes = [
        outcome(0.2, [0.5, 0.6, 0.7]),  # nothing was asked before
        outcome(1.0, [1.5, 1.6]),  # began too late
        outcome(2.0, [0.2, 0.5], tokens=2, asked=2),  # too slow from then on
        outcome(3.0, [0.1], tokens=1),  # cut off
        outcome(4.0, [], tokens=0, status=429),
        outcome(9.6, [], tokens=0, status=0),
    ]
    found = load_figures(outcomes, "chat", 2.0, GOALS)
    assert (found["requests"], found["complete"], found["refused"], found["failed"]) == (6, 3, 1, 2)
    assert found["goodput"] == {"share": pytest.approx(1 / 6), "requests_per_second": pytest.approx(1 / 9.5)}
    assert (found["requests_per_second"], found["tokens_per_second"]) == pytest.approx((3 / 9.5, 8 / 9.5))
    assert found["first_token_ms"]["p50"] == pytest.approx(500)
    assert found["first_token_ms"]["p99"] == pytest.approx(1500)
    assert found["per_token_ms"]["p99"] == pytest.approx(300)
    page = load_page(found | {"server": "localhost:8080"}, outcomes)
    assert "16.7 %" in page
    assert not re.search("https?://", page)
    load_page(load_figures(outcomes[3:], "chat", 2.0, GOALS) | {"server": "x"}, outcomes[3:])  # nothing to draw


def test_no_request_waits_for_another_and_waiting_counts_from_when_it_was_due(tmp_path: Path) -> None:
    """The server answers nobody until all have asked: a client that waits for answers would never end."""
    load = make_load("chat", 20, 1.0)
    door = Door(len(load))
    with open_door(door) as address:
        found, outcomes = bench_open_loop(address, "chat", 20, 1.0, GOALS)
    assert found["complete"] == len(load) == len(door.bodies) > 5
    assert {body["model"] for body in door.bodies} == {"tiny"}
    assert sorted(body["max_tokens"] for body in door.bodies) == sorted(asked.max_tokens for asked in load)
    last = load[-1].at
    for each in outcomes:
        assert each.arrivals[0] >= last - each.asked.at
    write_load_page(found, outcomes, tmp_path / "out.html")
    assert (tmp_path / "out.html").stat().st_size > 10_000


def test_a_server_that_ends_in_the_middle_of_an_event_is_measured() -> None:
    """Half an event, as of a server that is killed, ended the run and all that it had measured."""
    with open_door(Door(1, breaks=True)) as address:
        found, outcomes = bench_open_loop(address, "chat", 20, 0.5, GOALS)
    assert 0 < found["complete"] < len(outcomes)
    assert found["failed"] == len(outcomes) - found["complete"]


def test_a_front_that_speaks_https_is_measured_if_its_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = localhost_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with open_door(Door(1), context) as address:
        with pytest.raises(UnavailableError, match=r"not trusted: self-signed certificate; .* SSL_CERT_FILE"):
            bench_open_loop(f"https://{address}", "chat", 20, 0.5, GOALS)
        with pytest.raises(UnavailableError, match=f"give https://{address}"):
            bench_open_loop(address, "chat", 20, 0.5, GOALS)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        found, outcomes = bench_open_loop(f"https://{address}", "chat", 20, 0.5, GOALS)
    assert found["complete"] == len(outcomes) > 0
    with open_door(Door(1)) as address, pytest.raises(UnavailableError, match="does not speak HTTPS"):
        bench_open_loop(f"https://{address}", "chat", 20, 0.5, GOALS)


def test_why_requests_failed_is_said() -> None:
    with open_door(Door(1, refusal={"error": {"message": "this model has no chat template"}})) as address:
        figures, outcomes = bench_open_loop(address, "chat", 20, 0.5, GOALS)
    assert figures["failed"] == figures["requests"] == len(outcomes)
    assert figures["failures"] == [{"requests": len(outcomes), "why": "this model has no chat template"}]
    assert "this model has no chat template" in load_page(figures, outcomes)
    for body, why in (({"error": "x" * 5000}, "xxx"), ({"error": [1]}, "[1]"), ({"detail": "other"}, "HTTP status ")):
        with open_door(Door(1, refusal=body)) as address:
            (failure,) = bench_open_loop(address, "chat", 20, 0.5, GOALS)[0]["failures"]
        assert failure["why"].startswith(why)
        assert len(failure["why"]) <= 300
    cut, short = outcome(0.0, [0.5], tokens=2), outcome(0.0, [0.5])
    assert load_figures([cut, short], "chat", 2.0, GOALS)["failures"] == [{"requests": 1, "why": "2 of 3 tokens came"}]


def test_the_model_with_the_name_is_asked() -> None:
    door = Door(1)
    with open_door(door) as address:
        cli.bench_server(openai=address, name="tiny:2", rate=20, seconds=0.5)
        with pytest.raises(InputError, match=r"--name tiny:3: .* lists no such model; it has tiny, tiny:2"):
            bench_open_loop(address, "chat", 20, 0.5, GOALS, name="tiny:3")
    assert {body["model"] for body in door.bodies} == {"tiny:2"}


def test_an_address_is_said_as_it_was_given() -> None:
    for text in ("localhost:8080", "[::1]:8080"):  # also in the header host, by which a front knows who is meant
        assert str(Address.parsed(text)) == text


def test_what_cannot_be_measured_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("localhost", "http://localhost:8080/v1", ":80", "https://localhost", "ftp://localhost:1", "://a:1"):
        with pytest.raises(InputError, match="give host:port"):
            bench_open_loop(address, "chat", 1, 1, GOALS)
    with pytest.raises(InputError, match="must be above 0"):
        bench_open_loop("localhost:1", "chat", 0, 1, GOALS)
    with pytest.raises(InputError, match="give more seconds"):
        bench_open_loop("localhost:1", "chat", 1e-6, 1, GOALS)
    with pytest.raises(UnavailableError, match="no server answers"):
        bench_open_loop(f"127.0.0.1:{free_ports(1)[0]}", "chat", 5, 1, GOALS)
    with open_door(Door(1, status=401)) as address, pytest.raises(ServerError, match="OPENAI_API_KEY"):
        bench_open_loop(address, "chat", 5, 1, GOALS)
    for both in ({}, {"model": Path("a"), "openai": "localhost:1"}):
        with pytest.raises(ConfigError, match="give MODEL"):
            cli.bench_server(**both)
