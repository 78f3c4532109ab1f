"""`penjing bench server` of a text encoder: texts a second through a running server, beside ONNX Runtime alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from penjing.core.artifact.encoder import open_encoder_artifact
from penjing.core.errors import ServerError
from penjing.core.progress import Progress, Silent
from penjing.core.text.corpus import TOPIC_GAP, heldout_text
from penjing.serve.bench.requests import REQUEST_SECONDS, run_requests
from penjing.serve.client.client import AsyncClient, Client

REQUEST_TEXTS = 16
STREAMS = 16  # requests under way at once
SAME = 0.99  # cosine; the server pads otherwise than this process, which turns values near a tie


def bench_encoder(
    folder: Path,
    server: str = "localhost:8001",
    runs: int = 5,
    progress: Progress | None = None,
    *,
    texts: int = 1024,
    threads: int = 0,
) -> dict[str, Any]:
    """Measure the text encoder at `server` and, in turns, its file in this process: the cores are never busy with both.

    Sixteen requests of 16 paragraphs of Python's help are always under way; alone, the same paragraphs are embedded in
    one call of `EncoderArtifact.embed`. Both tokenize. `share` is the server's throughput ÷ ONNX Runtime's, medians.

    Args:
        folder: the artifact that is served.
        server: host:port of the gRPC endpoint.
        texts: of one turn, in whole requests; fewer than 256 keep fewer than sixteen requests under way.
        threads: of ONNX Runtime in this process; 0 takes one for each core, as the server does by default.

    Raises:
        InputError: the folder is no text encoder's artifact.
        ServerError: no server answers, or with other embeddings than this process: it serves another model.
    """
    progress = progress or Silent()
    artifact = open_encoder_artifact(folder)
    session = artifact.session(threads)
    requests = max(1, texts // REQUEST_TEXTS)
    given = mixed_texts(requests * REQUEST_TEXTS)
    parts = [given[at : at + REQUEST_TEXTS] for at in range(0, len(given), REQUEST_TEXTS)]
    with Client(server) as client:
        found = client.embed(parts[0], timeout=REQUEST_SECONDS)
    expected = artifact.embed(session, parts[0])
    if found.shape != expected.shape or not (found * expected).sum(1).mean() >= SAME:
        raise ServerError(f"{server} answers with other embeddings than {folder}: does it serve that artifact?")

    async def ask(client: AsyncClient, number: int) -> None:
        await client.embed(parts[number], timeout=REQUEST_SECONDS)

    rates: dict[str, list[float]] = {"onnxruntime": [], "server": []}
    latencies: list[float] = []
    progress.start("benchmark", runs + 1)
    for turn in range(runs + 1):
        started = time.perf_counter()
        artifact.embed(session, given)
        alone = time.perf_counter() - started
        over, seconds = asyncio.run(run_requests(server, ask, requests, STREAMS))
        if turn > 0:  # the first turn warms memory up
            rates["onnxruntime"].append(len(given) / alone)
            rates["server"].append(len(given) / over)
            latencies += seconds
        progress.advance()
    speeds = {name: median(values) for name, values in rates.items()}
    return {
        "texts_per_second": speeds,
        "share": speeds["server"] / speeds["onnxruntime"],
        "latency_ms": {f"p{share}": 1000 * float(np.percentile(latencies, share)) for share in (50, 99)},
        "runs": runs,
        "model": str(folder),
        "server": server,
    }


def mixed_texts(count: int) -> list[str]:
    """`count` paragraphs of Python's help, from a heading to a page, in the order of the text and again from its start
    where there are fewer; each is one line."""
    lines = [" ".join(paragraph.split()) for paragraph in heldout_text().split(TOPIC_GAP)]
    found = [line for line in lines if line]
    return [found[index % len(found)] for index in range(count)]
