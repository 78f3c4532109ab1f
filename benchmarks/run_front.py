"""Measure what OpenAI's interface costs: answers over HTTP, over gRPC and in process, in turns; appends rows.

    python benchmarks/run_front.py            # two minutes
    python benchmarks/run_front.py --figures  # seconds: only what the front's own figures and log lines cost

One server has both doors; its prefix cache is off. `streams_16_…` are tokens a second of 16 prompts of 128 tokens with
64 new tokens each, prompts included. `…_joined` are those of a second server with `stream_interval=0.1`, and
`…_json_schema` are held to a schema over HTTP. `processor_time` is what the front's process uses for a token of these
streams. `first_token` is what one client waits after a prompt of 32 tokens, and `first_token_added` the median
difference between HTTP and gRPC. `memory_1000_streams` is what the front's process grows by while 1 000 streams are
open, of which 16 run and the others wait. `figures_and_log` is the processor time, in one thread and without a server,
of a token's part in the histograms, the counters and the line of a request of 64 tokens that come in 16 pieces. Rows
are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from lib.chaos_load import http_request, http_stream
from lib.chaos_server import Patient, resident, served, wait_until
from lib.models import add_arguments, make_models, make_prompts, say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from run_sharing import SCHEMA

from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.serve.bench.engine import run_prompts
from penjing.serve.client.client import AsyncClient, Client
from penjing.serve.engine.config import EngineConfig
from penjing.serve.gate.guard import Exchange
from penjing.serve.gate.log import log_exchange, open_log
from penjing.serve.gate.usage import Usage
from penjing.serve.runner.load import load_engine

NUM_STREAMS, NEW_TOKENS = 16, 64
JOINED = 0.1  # seconds for which a second server joins tokens
PROBES = 10  # first tokens of a round, by each door
IDLE_STREAMS = 1000
IDLE_TOKENS = 1024  # so that no stream ends while the others open
OPEN_SECONDS = 60.0
FREE: dict[str, Any] = {"temperature": 0.8, "seed": 1}
GREEDY: dict[str, Any] = {"temperature": 0.0}
PATH, PIECES = "/v1/completions", 16
FIGURES_ROUNDS, FIGURES_REQUESTS = 7, 300
Prompts = list[list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(rounds=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    parser.add_argument("--figures", action="store_true", help="measure what figures and log lines cost, and no more")
    arguments = parser.parse_args()
    if arguments.figures:
        append("front", [figures_row()], arguments.results)
        return 0
    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # of the engine here and of the one that is served
    prompts = json.loads(make_prompts(artifact).read_text())
    engine = load_engine(artifact, EngineConfig(enable_prefix_caching=False, max_num_sequences=NUM_STREAMS))
    settings = "enable_prefix_caching=false", f"max_num_sequences={NUM_STREAMS}"
    with served(artifact, *settings) as patient, served(artifact, *settings, f"stream_interval={JOINED}") as joined:
        crowd: Prompts = prompts["p16"]
        contestants: dict[str, Callable[[], dict[str, float]]] = {
            "process": lambda: {"process": speed(run_prompts(engine, crowd, NEW_TOKENS).seconds)},
            "grpc": lambda: {"grpc": speed(asyncio.run(by_grpc(patient, crowd)))},
            "joined": lambda: {"joined": speed(asyncio.run(by_grpc(joined, crowd)))},
            "http": lambda: with_processor_time(patient, crowd),
            "free": lambda: {"free": speed(asyncio.run(by_http(patient, crowd, FREE)))},
            "schema": lambda: {"schema": speed(asyncio.run(by_http(patient, crowd, FREE | {"guided_json": SCHEMA})))},
            "first": lambda: first_tokens(patient, prompts["p32"]),
        }
        rounds: list[dict[str, float]] = []
        for turn in range(arguments.rounds + 1):
            shift = turn % len(contestants)
            figures: dict[str, float] = {}
            for name in [*list(contestants)[shift:], *list(contestants)[:shift]]:
                figures |= contestants[name]()
            said = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
            say(f"round {turn}/{arguments.rounds}: {said}")
            if turn > 0:  # the first turn warms up
                rounds.append(figures)
        memory = memory_of_streams(patient, IDLE_STREAMS)
    append("front", [*front_rows(rounds, memory), figures_row()], arguments.results)
    return 0


def speed(seconds: float) -> float:
    """Tokens a second of the 16 answers."""
    return NUM_STREAMS * NEW_TOKENS / seconds


async def by_grpc(patient: Patient, prompts: Prompts) -> float:
    """Seconds until all answers are there, asked for at once.

    Raises:
        SetupError: an answer has another length.
    """

    async def ask(prompt: list[int]) -> None:
        chunks = client.stream(prompt, max_tokens=NEW_TOKENS, ignore_eos=True, **GREEDY)
        check_length(sum([chunk.num_tokens async for chunk in chunks]), "gRPC")

    async with AsyncClient(patient.address) as client:
        await client.is_ready()  # connects
        started = time.perf_counter()
        await asyncio.gather(*map(ask, prompts))
        return time.perf_counter() - started


async def by_http(patient: Patient, prompts: Prompts, asked: dict[str, Any]) -> float:
    """The same as server-sent events; sockets are read as they are, since a client's work takes the server's cores."""

    async def ask(prompt: list[int]) -> None:
        body = {"model": patient.model, "prompt": prompt, "max_tokens": NEW_TOKENS, "ignore_eos": True, **asked}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        reader, writer = await asyncio.open_connection("127.0.0.1", patient.front_port)
        writer.write(http_request(body))
        received = await reader.read()
        writer.close()
        check_length(tokens_of(received), "HTTP")

    started = time.perf_counter()
    await asyncio.gather(*map(ask, prompts))
    return time.perf_counter() - started


def tokens_of(received: bytes) -> int:
    """Of an answer as it came over the wire, by its last event but `[DONE]`.

    Raises:
        SetupError: it is no whole answer; shows its beginning.
    """
    events = [line.removeprefix(b"data: ") for line in received.splitlines() if line.startswith(b"data: ")]
    if len(events) < 2 or events[-1] != b"[DONE]" or b'"completion_tokens"' not in events[-2]:
        raise SetupError(f"the front did not answer in full: {received[:500]!r}")
    return json.loads(events[-2])["usage"]["completion_tokens"]


def check_length(tokens: int, door: str) -> None:
    """Refuse figures of answers that are not as long as they should be."""
    if tokens != NEW_TOKENS:
        raise SetupError(f"{NEW_TOKENS} tokens were asked for by {door}, and {tokens} came")


def with_processor_time(patient: Patient, prompts: Prompts) -> dict[str, float]:
    """Tokens a second over HTTP, and microseconds of the front's processor time for each."""
    pid = patient.pids()["front"]
    before = processor_seconds(pid)
    seconds = asyncio.run(by_http(patient, prompts, GREEDY))
    used = processor_seconds(pid) - before
    return {"http": speed(seconds), "processor": 1e6 * used / (NUM_STREAMS * NEW_TOKENS)}


def processor_seconds(pid: int) -> float:
    """What a process has used so far; /proc/PID/stat counts in 10 ms, which is 10 µs a token here.

    Raises:
        SetupError: there is no such process.
    """
    clock = ctypes.c_int()
    if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise SetupError(f"there is no process {pid}: the front has ended")
    return time.clock_gettime(clock.value)


def first_tokens(patient: Patient, prompt: list[int]) -> dict[str, float]:
    """Median milliseconds to the first token by each door, connected before, and of the differences."""
    over_http, over_grpc = [], []
    connection = http.client.HTTPConnection("127.0.0.1", patient.front_port, timeout=60)
    connection.connect()
    with Client(patient.address, timeout=60) as client:
        client.is_ready(10)
        for _ in range(PROBES):
            started = time.perf_counter()
            stream = client.stream(prompt, max_tokens=1, **GREEDY)
            next(stream)
            over_grpc.append(time.perf_counter() - started)
            stream.close()
            body = {"model": patient.model, "prompt": prompt, "max_tokens": 1, "stream": True, **GREEDY}
            started = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if not (line := response.readline()).startswith(b"data: "):
                raise SetupError(f"the front did not stream: {line[:500]!r}")
            over_http.append(time.perf_counter() - started)
            response.read()
    connection.close()
    added = median(a - b for a, b in zip(over_http, over_grpc, strict=True))
    return {
        "first_http": 1000 * median(over_http),
        "first_grpc": 1000 * median(over_grpc),
        "first_added": 1000 * added,
    }


def memory_of_streams(patient: Patient, count: int) -> float:
    """Bytes that the front's process grows by while so many streams are open.

    Raises:
        SetupError: they do not all reach the engine.
    """
    pid = patient.pids()["front"]
    before = resident(pid)
    body = {"model": patient.model, "prompt": "A story", "max_tokens": IDLE_TOKENS, "ignore_eos": True, "stream": True}

    def all_there() -> bool:
        figures = patient.figures()
        return figures["num_requests_running"] + figures["num_requests_waiting"] >= count

    with ExitStack() as streams:
        for _ in range(count):
            streams.enter_context(http_stream(patient, body))
        if not wait_until(all_there, OPEN_SECONDS):
            raise SetupError(f"{count} streams were opened, and the engine knows of fewer after {OPEN_SECONDS:.0f} s")
        return float(resident(pid) - before)


def figures_row() -> Row:
    """What `penjing.serve.gate.usage` and `log` cost."""
    usage = Usage(frozenset({PATH}))
    found = []
    with TemporaryDirectory() as folder:
        open_log(Path(folder) / "front.log")
        for _ in range(FIGURES_ROUNDS):
            started = time.thread_time()
            for number in range(FIGURES_REQUESTS):
                exchange = Exchange(str(number), path=PATH, model="llm", status=200)
                usage.first_token(exchange, 0.01)
                for _ in range(PIECES):
                    usage.tokens(exchange, NEW_TOKENS // PIECES, 0.04)
                    exchange.count(0, NEW_TOKENS // PIECES)
                usage.ended(exchange)
                log_exchange({"method": "POST", "path": PATH}, exchange)
            found.append(1e6 * (time.thread_time() - started) / (FIGURES_REQUESTS * NEW_TOKENS))
    return new_row("front", "figures_and_log", median(found), "µs a token", runs=FIGURES_ROUNDS)


def front_rows(rounds: list[dict[str, float]], memory: float) -> list[Row]:
    """Rows from the rounds' figures and the bytes of the idle streams; see the top of this file."""
    runs = len(rounds)
    middle = {name: median(figures[name] for figures in rounds) for name in rounds[0]}

    def row(metric: str, name: str, unit: str, baseline: str | None = None, beside: str = "") -> Row:
        value = middle.get(beside)
        return new_row("front", metric, middle[name], unit, runs=runs, baseline=baseline, baseline_value=value)

    return [
        row("streams_16_http", "http", "tok/s", "gRPC", "grpc"),
        row("streams_16_http", "http", "tok/s", "in process", "process"),
        row("streams_16_grpc", "grpc", "tok/s", "in process", "process"),
        row("streams_16_grpc_joined", "joined", "tok/s", "in process", "process"),
        row("streams_16_json_schema", "schema", "tok/s", "free text over HTTP", "free"),
        row("processor_time", "processor", "µs a token"),
        row("first_token", "first_http", "ms", "gRPC", "first_grpc"),
        row("first_token_added", "first_added", "ms"),
        new_row("front", f"memory_{IDLE_STREAMS}_streams", memory, "bytes", runs=1),
    ]


if __name__ == "__main__":
    sys.exit(guarded(main))
