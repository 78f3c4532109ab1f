"""`penjing bench server` of a batched model: rows a second through a running server, beside this process alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penjing.core.errors import InputError
from penjing.core.progress import Progress, Silent
from penjing.serve.client.client import AsyncClient, Client
from penjing.serve.families.base import Workload, family_at

RUNS = 5


def bench_batched(
    folder: Path,
    server: str = "localhost:8001",
    runs: int = RUNS,
    progress: Progress | None = None,
    name: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure the model at `server` and, in turns, its file in this process: the cores are never busy with both.

    `share` is the server's throughput ÷ that of ONNX Runtime in this process, medians; latencies are those of the
    first way to ask. `client_cores` is how many cores this process, the client, keeps from the server while it asks: on
    one machine they share them.

    Args:
        folder: the artifact that is served.
        server: host:port of the gRPC endpoint.
        name: the model's on the server; None: that of its kind.
        options: of the family's workload: `images`, `texts`, `threads` …

    Raises:
        InputError: the folder is no artifact of a family that is batched.
        ServerError: no server answers, or with other answers than this process: it serves another model.
    """
    progress = progress or Silent()
    prepare = family_at(folder).workload
    if prepare is None:
        raise InputError(f"{folder} is no artifact whose requests are batched; 'penjing bench server' measures it")
    with Client(server, model=name) as client:
        work = prepare(folder, client, **options)
    rates: dict[str, list[float]] = {"onnxruntime": [], **{name: [] for name in work.forms}}
    latencies: list[float] = []
    client_cores: list[float] = []
    progress.start("benchmark", runs + 1)
    for turn in range(runs + 1):
        found = {"onnxruntime": _run_alone(work)}
        for index, (form, parts) in enumerate(work.forms.items()):
            found[form], seconds, cores = _run_requests(server, name, work, parts)
            if turn > 0 and index == 0:
                latencies += seconds
                client_cores.append(cores)
        if turn > 0:  # the first turn warms memory up
            for form, rate in found.items():
                rates[form].append(rate)
        progress.advance()
    speeds = {name: median(values) for name, values in rates.items()}
    shares = {name: speeds[name] / speeds["onnxruntime"] for name in work.forms}
    return {
        f"{work.unit}_per_second": speeds,
        "share": shares if len(shares) > 1 else next(iter(shares.values())),
        **work.facts,
        "client_cores": median(client_cores),
        "latency_ms": {f"p{share}": 1000 * float(np.percentile(latencies, share)) for share in (50, 99)},
        "runs": runs,
        "model": str(folder),
        "server": server,
    }


def _run_alone(work: Workload) -> float:
    """Rows a second."""
    started = time.perf_counter()
    rows = work.alone()
    return rows / (time.perf_counter() - started)


def _run_requests(server: str, name: str | None, work: Workload, parts: Any) -> tuple[float, list[float], float]:
    """Rows a second, each request's seconds, and the cores that this process used."""

    async def ask(client: AsyncClient, number: int) -> None:
        await work.ask(client, parts[number % len(parts)])

    used = time.process_time()
    together, seconds = asyncio.run(run_requests(server, ask, work.num_requests, work.streams, name))
    return work.num_requests * work.request_rows / together, seconds, (time.process_time() - used) / together


async def run_requests(
    server: str,
    ask: Callable[[AsyncClient, int], Awaitable[object]],
    requests: int,
    streams: int,
    name: str | None = None,
) -> tuple[float, list[float]]:
    """Send `requests` requests, each as soon as one of the `streams` that are always under way is answered.

    Args:
        server: host:port of the gRPC endpoint.
        ask: sends the request of a number, from 0, and waits for its answer.

    Returns:
        Seconds of all together, and of each.
    """
    left = iter(range(requests))
    seconds: list[float] = []

    async def stream() -> None:
        for number in left:
            started = time.perf_counter()
            await ask(client, number)
            seconds.append(time.perf_counter() - started)

    async with AsyncClient(server, model=name) as client:
        await client.is_ready()  # connects
        started = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return time.perf_counter() - started, seconds
