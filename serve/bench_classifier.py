"""`penjing bench server` of a classifier: images a second through a running server, beside ONNX Runtime alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penjing.core.errors import ServerError
from penjing.core.onnx_runtime import INPUT, run_session
from penjing.core.progress import Progress, Silent
from penjing.core.vision_artifact import normalised, open_vision_artifact
from penjing.serve.bench_requests import REQUEST_SECONDS, STREAMS, run_requests
from penjing.serve.client import AsyncClient, Client

LOCAL_BATCH = 64
REQUEST_IMAGES = 16  # of one request; sixteen under way are four batches of 64


def bench_classifier(
    folder: Path,
    server: str = "localhost:8001",
    runs: int = 5,
    progress: Progress | None = None,
    *,
    images: int = 4096,
    threads: int = 0,
) -> dict[str, Any]:
    """Measure the classifier at `server` and, in turns, its file in this process: the cores are never busy with both.

    Sixteen requests of 16 images are always under way, as normalised floats and as pixels; alone, ONNX Runtime runs
    batches of 64 floats. Every answer is checked. `share` is the server's throughput ÷ ONNX Runtime's, medians.

    Args:
        folder: the artifact that is served.
        server: host:port of the gRPC endpoint.
        images: of one turn.
        threads: of ONNX Runtime in this process; 0 takes one for each core, as the server does by default.

    Raises:
        InputError: the folder is no classifier's artifact.
        ServerError: no server answers, or with other logits than this process: it serves another model.
    """
    progress = progress or Silent()
    artifact = open_vision_artifact(folder)
    session = artifact.session(threads)
    shape = (LOCAL_BATCH, artifact.config.model.in_channels, *artifact.config.image_size)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    floats = normalised(pixels, artifact.config)
    expected = run_session(session, floats)
    with Client(server) as client:
        if not np.allclose(client.classify(floats[:REQUEST_IMAGES]).logits, expected[:REQUEST_IMAGES], atol=1e-3):
            raise ServerError(f"{server} answers with other logits than {folder}: does it serve that artifact?")
    rates: dict[str, list[float]] = {"onnxruntime": [], "server_floats": [], "server_pixels": []}
    latencies: list[float] = []
    progress.start("benchmark", runs + 1)
    for turn in range(runs + 1):
        alone = _run_local(session, floats, images)
        over, seconds = _run_requests(server, floats, images)
        over_pixels, _ = _run_requests(server, pixels, images)
        if turn > 0:  # the first turn warms memory up
            for name, rate in (("onnxruntime", alone), ("server_floats", over), ("server_pixels", over_pixels)):
                rates[name].append(rate)
            latencies += seconds
        progress.advance()
    speeds = {name: median(values) for name, values in rates.items()}
    return {
        "images_per_second": speeds,
        "share": {name: speeds[name] / speeds["onnxruntime"] for name in ("server_floats", "server_pixels")},
        "latency_ms": {f"p{share}": 1000 * float(np.percentile(latencies, share)) for share in (50, 99)},
        "runs": runs,
        "model": str(folder),
        "server": server,
    }


def _run_local(session: Any, floats: np.ndarray, images: int) -> float:
    """Images a second."""
    count = max(1, images // LOCAL_BATCH)
    started = time.perf_counter()
    for _ in range(count):
        session.run(None, {INPUT: floats})
    return count * LOCAL_BATCH / (time.perf_counter() - started)


def _run_requests(server: str, given: np.ndarray, images: int) -> tuple[float, list[float]]:
    """Images a second, and each request's seconds."""
    parts = [given[at : at + REQUEST_IMAGES] for at in range(0, LOCAL_BATCH, REQUEST_IMAGES)]
    requests = max(STREAMS, images // REQUEST_IMAGES)

    async def ask(client: AsyncClient, number: int) -> None:
        await client.classify(parts[number % len(parts)], timeout=REQUEST_SECONDS)

    together, seconds = asyncio.run(run_requests(server, ask, requests))
    return requests * REQUEST_IMAGES / together, seconds
