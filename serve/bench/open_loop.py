"""`penjing bench server --openai`: an open loop of requests over HTTP, timed from when each was meant to be sent.

Clients that wait for an answer before they ask again send less to a server that is slow, and so do not measure how slow
it is ("coordinated omission"). Here requests have times of their own, drawn before the first is sent. What a request
waits because this process or a connection was late counts as the server's.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import ssl
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penjing.core.errors import InputError, ServerError, UnavailableError, first_line
from penjing.core.progress import Progress, Silent
from penjing.serve.bench.intervals import percentiles
from penjing.serve.bench.load import Asked, Scenario, make_load
from penjing.serve.client.protocol import host_port

KEY = "OPENAI_API_KEY"
"""Variable of the environment with the key, since every user of a machine can read arguments."""
LINE_BYTES = 1 << 20
REQUEST_SECONDS = 600.0
HANDSHAKE_SECONDS = 30.0
KINDS_OF_FAILURES = 3  # that are shown, the most frequent first


class Address(NamedTuple):
    """Where the front is; with a `context` it is asked by HTTPS."""

    host: str
    port: int
    context: ssl.SSLContext | None = None

    @classmethod
    def parsed(cls, text: str) -> Address:
        """Of host:port or https://host:port. Certificates are checked against the system's authorities, or those of the
        file that SSL_CERT_FILE names.

        Raises:
            InputError: it is neither.
        """
        scheme, mark, place = text.rpartition("://")
        host, _, port = place.rpartition(":")
        if not host or not port.isdigit() or "/" in place or scheme not in (("http", "https") if mark else ("",)):
            raise InputError(f"--openai {text!r}: give host:port, such as localhost:8080, or https://host:port")
        return cls(host.strip("[]"), int(port), ssl.create_default_context() if scheme == "https" else None)

    def __str__(self) -> str:
        return host_port(self.host, self.port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own for a request."""
        patience = None if self.context is None else HANDSHAKE_SECONDS
        return await asyncio.open_connection(
            self.host, self.port, ssl=self.context, ssl_handshake_timeout=patience, limit=LINE_BYTES
        )


@dataclass
class Outcome:
    """What became of one request; seconds from the moment at which it was meant to be sent."""

    asked: Asked
    status: int = 0
    """Of HTTP; 0: there was no connection."""
    tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When pieces of text came."""
    late: float = 0.0
    """How much later than meant it was sent."""
    end: float = 0.0
    error: str = ""
    """What the server or the connection said of it."""

    @property
    def refused(self) -> bool:
        """Whether the server had too much to do."""
        return self.status in (429, 503)

    @property
    def failure(self) -> str:
        """Why it failed; empty if it was answered in full, or refused."""
        if self.complete or self.refused:
            return ""
        came = f"{self.tokens} of {self.asked.max_tokens} tokens came"
        return self.error or (came if self.status in (0, 200) else f"HTTP status {self.status}")

    @property
    def complete(self) -> bool:
        """Whether the whole answer came."""
        return self.status == 200 and bool(self.arrivals) and self.tokens == self.asked.max_tokens

    @property
    def gaps(self) -> list[float]:
        """Between pieces of text; a piece has several tokens where they came within the server's interval."""
        return [after - before for before, after in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def per_token(self) -> float:
        """Seconds a token after the first piece."""
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.tokens - 1)

    def good(self, first: float, between: float) -> bool:
        """Whether it began within `first` seconds and went on with a token within `between`, on average."""
        return self.complete and self.arrivals[0] <= first and self.per_token <= between


def bench_open_loop(
    address: str,
    scenario: Scenario,
    rate: float,
    seconds: float,
    goals: tuple[float, float],
    progress: Progress | None = None,
    name: str | None = None,
) -> tuple[dict[str, Any], list[Outcome]]:
    """Send the load of `scenario` to the front at `address`, host:port or https://host:port, and wait for every answer.

    Args:
        rate: requests a second.
        seconds: in which requests are sent.
        goals: seconds to the first token and seconds a token, within which a request counts as good.
        name: of the model that is asked; None: the first that the server lists.

    Returns: figures, and what became of each request.

    Raises:
        InputError: an address or a rate that cannot be used, a load without a request, or a name that the server does
            not list.
        UnavailableError: no server answers.
        ServerError: it shows no model to us.
    """
    place = Address.parsed(address)
    if not (math.isfinite(rate) and rate > 0 and math.isfinite(seconds) and seconds > 0):
        raise InputError(f"--rate {rate:g} and --seconds {seconds:g} must be above 0")
    load = make_load(scenario, rate, seconds)
    if not load:
        raise InputError(f"{rate:g} requests a second for {seconds:g} s are none; give more seconds")
    outcomes = asyncio.run(_run(place, load, progress or Silent(), name))
    return load_figures(outcomes, scenario, rate, goals) | {"server": address}, outcomes


def load_figures(outcomes: Sequence[Outcome], scenario: str, rate: float, goals: tuple[float, float]) -> dict[str, Any]:
    """What the outcomes come to: percentiles in milliseconds of complete answers, shares of all requests.

    A second of `requests_per_second` and `tokens_per_second` is one between the first request and the last end.
    """
    complete = [outcome for outcome in outcomes if outcome.complete]
    good = sum(outcome.good(*goals) for outcome in outcomes)
    first = min(outcome.asked.at for outcome in outcomes)  # what is idle before it says nothing about the server
    span = max(outcome.asked.at + outcome.end for outcome in outcomes) - first
    refused = sum(outcome.refused for outcome in outcomes)
    failures = Counter(failure for outcome in outcomes if (failure := outcome.failure))
    return {
        "scenario": scenario,
        "rate": rate,
        "requests": len(outcomes),
        "complete": len(complete),
        "refused": refused,
        "failed": failures.total(),
        "failures": [{"requests": count, "why": why} for why, count in failures.most_common(KINDS_OF_FAILURES)],
        "goals": {"first_token_ms": 1000 * goals[0], "per_token_ms": 1000 * goals[1]},
        "goodput": {"share": good / len(outcomes), "requests_per_second": good / span},
        "requests_per_second": len(complete) / span,
        "tokens_per_second": sum(outcome.tokens for outcome in complete) / span,
        "first_token_ms": percentiles([outcome.arrivals[0] for outcome in complete]),
        "between_pieces_ms": percentiles([gap for outcome in complete for gap in outcome.gaps]),
        "per_token_ms": percentiles([outcome.per_token for outcome in complete if outcome.tokens > 1]),
        "whole_answer_ms": percentiles([outcome.end for outcome in complete]),
        "sent_late_ms": percentiles([outcome.late for outcome in outcomes]),
    }


async def _run(address: Address, load: Sequence[Asked], progress: Progress, name: str | None) -> list[Outcome]:
    try:
        status, body = await _get(address, "/v1/models")
    except ssl.SSLCertVerificationError as error:
        raise UnavailableError(
            f"the certificate of {address} is not trusted: {error.verify_message}; to trust one of your own put the "
            "path of its PEM file into SSL_CERT_FILE"
        ) from None
    except ssl.SSLError as error:
        raise UnavailableError(
            f"{address} does not speak HTTPS ({error.reason or error}); leave out https://"
        ) from None
    except OSError as error:
        raise UnavailableError(f"no server answers at {address}: {error.strerror or error}") from None
    if not status and address.context is None:
        raise UnavailableError(f"{address} does not speak HTTP; if it speaks HTTPS, give https://{address}")
    if status != 200:
        hint = f"; it asks for a key: put one into {KEY}" if status == 401 else ""
        raise ServerError(f"{address} answers /v1/models with {status}{hint}")
    listed = [model["id"] for model in json.loads(body)["data"]]
    if name is not None and name not in listed:
        raise InputError(f"--name {name}: {address} lists no such model; it has {', '.join(listed)}")
    model = name or listed[0]
    progress.start("load", len(load))
    started = time.monotonic()

    async def ask(asked: Asked) -> Outcome:
        await asyncio.sleep(started + asked.at - time.monotonic())
        outcome = Outcome(asked)
        await send(address, outcome, model, started + asked.at)
        progress.advance()
        return outcome

    return list(await asyncio.gather(*map(ask, load)))


async def send(address: Address, outcome: Outcome, model: str, due: float) -> None:
    """Send a request and note what comes; what goes wrong is its outcome."""
    outcome.late = max(0.0, time.monotonic() - due)
    try:
        reader, writer = await address.connect()
    except OSError as error:
        outcome.error, outcome.end = f"no connection ({first_line(error)})", time.monotonic() - due
        return
    try:
        async with asyncio.timeout(REQUEST_SECONDS):
            writer.write(_request(address, "POST", "/v1/chat/completions", outcome.asked.body(model)))
            outcome.status = _status(await reader.readline())
            while line := await reader.readline():
                refusal = outcome.status != 200 and line.startswith(b"{") and line.rstrip().endswith(b"}")
                if not (line.startswith(b"data: {") or refusal):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if error := event.get("error"):
                    outcome.error = f"{error.get('message', error) if isinstance(error, dict) else error!s:.300}"
                if any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    outcome.arrivals.append(time.monotonic() - due)
                if event.get("usage"):
                    outcome.tokens = event["usage"]["completion_tokens"]
    except TimeoutError:
        outcome.tokens, outcome.error = 0, f"not answered within {REQUEST_SECONDS:g} s"
    except (OSError, ValueError) as error:  # of the connection, of TLS; or half an event came last
        outcome.tokens, outcome.error = 0, f"the connection ended early ({first_line(error)})"
    finally:
        writer.close()
        outcome.end = time.monotonic() - due


async def _get(address: Address, path: str) -> tuple[int, bytes]:
    reader, writer = await address.connect()
    try:
        writer.write(_request(address, "GET", path))
        answer = await reader.read()
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return _status(head), body


def _request(address: Address, method: str, path: str, content: Any = None) -> bytes:
    """A request on a connection of its own."""
    body = b"" if content is None else json.dumps(content).encode()
    lines = [f"{method} {path} HTTP/1.1", f"host: {address}", "connection: close", f"content-length: {len(body)}"]
    lines += ["content-type: application/json"] if body else []
    lines += [f"authorization: Bearer {os.environ[KEY]}"] if os.environ.get(KEY) else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def _status(line: bytes) -> int:
    words = line.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
