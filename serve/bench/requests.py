"""Requests of batched models, several always under way: what `penjing bench server` times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from penjing.serve.client.client import AsyncClient

REQUEST_SECONDS = 120.0  # until a request has failed


async def run_requests(
    server: str, ask: Callable[[AsyncClient, int], Awaitable[object]], requests: int, streams: int
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

    async with AsyncClient(server) as client:
        await client.is_ready()  # connects
        started = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return time.perf_counter() - started, seconds
