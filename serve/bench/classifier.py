"""`penjing bench server` of a classifier: images a second through a running server, beside ONNX Runtime alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penjing.core.artifact.classifier import normalised, open_vision_artifact
from penjing.core.errors import ServerError
from penjing.core.progress import Progress, Silent
from penjing.core.runtime.onnx_runtime import INPUT, run_session
from penjing.serve.bench.requests import REQUEST_SECONDS, run_requests
from penjing.serve.client.client import AsyncClient, Client

LOCAL_BATCH = 64
IMAGES_UNDER_WAY = 256  # four batches


def bench_classifier(
    folder: Path,
    server: str = "localhost:8001",
    runs: int = 5,
    progress: Progress | None = None,
    *,
    images: int = 4096,
    threads: int = 0,
    request_images: int = LOCAL_BATCH,
) -> dict[str, Any]:
    """Measure the classifier at `server` and, in turns, its file in this process: the cores are never busy with both.

    256 images are always under way to the server, as normalised floats and as pixels; alone, ONNX Runtime runs batches
    of 64 floats. `share` is the server's throughput ÷ ONNX Runtime's, medians. `client_cores` is how many cores this
    process, the client, keeps from the server while it asks: on one machine they share them.

    Args:
        folder: the artifact that is served.
        server: host:port of the gRPC endpoint.
        images: of one turn.
        threads: of ONNX Runtime in this process; 0 takes one for each core, as the server does by default.
        request_images: of one request, up to 64: by default what ONNX Runtime runs at once alone.

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
        if not np.allclose(client.classify(floats).logits, expected, atol=1e-3):
            raise ServerError(f"{server} answers with other logits than {folder}: does it serve that artifact?")
    rates: dict[str, list[float]] = {"onnxruntime": [], "server_floats": [], "server_pixels": []}
    latencies: list[float] = []
    client_cores: list[float] = []
    progress.start("benchmark", runs + 1)
    for turn in range(runs + 1):
        alone = _run_local(session, floats, images)
        over, seconds, cores = _run_requests(server, floats, images, request_images)
        over_pixels, *_ = _run_requests(server, pixels, images, request_images)
        if turn > 0:  # the first turn warms memory up
            for name, rate in (("onnxruntime", alone), ("server_floats", over), ("server_pixels", over_pixels)):
                rates[name].append(rate)
            latencies += seconds
            client_cores.append(cores)
        progress.advance()
    speeds = {name: median(values) for name, values in rates.items()}
    return {
        "images_per_second": speeds,
        "share": {name: speeds[name] / speeds["onnxruntime"] for name in ("server_floats", "server_pixels")},
        "request_images": request_images,
        "client_cores": median(client_cores),
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


def _run_requests(server: str, given: np.ndarray, images: int, request_images: int) -> tuple[float, list[float], float]:
    """Images a second, each request's seconds, and the cores that this process used."""
    parts = [given[at : at + request_images] for at in range(0, LOCAL_BATCH - request_images + 1, request_images)]
    streams = max(1, IMAGES_UNDER_WAY // request_images)
    requests = max(streams, images // request_images)

    async def ask(client: AsyncClient, number: int) -> None:
        await client.classify(parts[number % len(parts)], timeout=REQUEST_SECONDS)

    used = time.process_time()
    together, seconds = asyncio.run(run_requests(server, ask, requests, streams))
    return requests * request_images / together, seconds, (time.process_time() - used) / together
