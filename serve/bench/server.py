"""`penjing bench server`: figures of `penjing bench engine` through a running server, beside the engine alone."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import Any

from penjing.core.progress import Progress, Silent
from penjing.core.text.corpus import heldout_tokens
from penjing.serve.bench.engine import NUM_STREAMS, Timing, run_prompts
from penjing.serve.bench.intervals import percentiles
from penjing.serve.client.client import AsyncClient, Client
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.runner.load import load_engine

RUNS = 3
CASES = {"one_first": (1, 32, 1), "one_all": (1, 32, 129), "streams_all": (NUM_STREAMS, 128, 64)}
"""Prompts, tokens of each, new tokens of each."""
REQUEST_SECONDS = 600.0


def bench_server(
    folder: Path,
    server: str = "localhost:8001",
    runs: int = RUNS,
    progress: Progress | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Measure the model at `server` and, in turns, the same model in this process: two cores are never busy with both.

    Every run has prompts of its own, so that the server's prefix cache does not help. `overhead` is the share of
    throughput that the server costs: 1 − server ÷ engine.

    Args:
        folder: the checkpoint or artifact that is served.
        server: host:port of the gRPC endpoint.
        name: the model's on the server; None: that of its kind.

    Raises:
        InputError: the folder is no model.
        ServerError: no server answers.
    """
    progress = progress or Silent()
    with Client(server, model=name) as client:
        client.generate("a", max_tokens=1)  # raises at once when there is no server
    engine = load_engine(folder, EngineConfig(enable_prefix_caching=False, max_num_sequences=NUM_STREAMS))
    timings: dict[str, dict[str, list[Timing]]] = {who: {case: [] for case in CASES} for who in ("server", "engine")}
    progress.start("benchmark", (runs + 1) * len(CASES))
    for turn in range(runs + 1):
        for case, (count, length, num_new_tokens) in CASES.items():
            texts = _texts(engine, count, length, turn)
            prompts = [engine.tokenizer.encode(text) for text in texts]
            over = asyncio.run(_run_prompts(server, name, texts, num_new_tokens))
            alone = run_prompts(engine, prompts, num_new_tokens)
            if turn > 0:  # the first turn warms caches and pages up
                timings["server"][case].append(over)
                timings["engine"][case].append(alone)
            progress.advance()
    speeds = {who: _speeds(cases) for who, cases in timings.items()}
    over = timings["server"]
    return {
        "tokens_per_second": speeds,
        "overhead": {name: 1 - speeds["server"][name] / speeds["engine"][name] for name in speeds["server"]},
        "time_to_first_token_ms": {
            "prompt_32": 1000 * median(timing.seconds for timing in over["one_first"]),
            "streams_16": 1000
            * median(value for timing in over["streams_all"] for value in timing.first_token_seconds),
        },
        "inter_token_ms": {
            "one_stream": percentiles([value for timing in over["one_all"] for value in timing.inter_token_seconds]),
            "streams_16": percentiles(
                [value for timing in over["streams_all"] for value in timing.inter_token_seconds]
            ),
        },
        "runs": runs,
        "model": str(folder),
        "scheme": engine.scheme,
        "server": server,
    }


def _texts(engine: LLMEngine, count: int, length: int, turn: int) -> list[str]:
    """Texts of about `length` tokens from the held-out corpus; another `turn` starts one token later."""
    tokens = heldout_tokens(engine.tokenizer, 300 * count + length + turn).tolist()
    return [engine.tokenizer.decode(tokens[300 * i + turn : 300 * i + turn + length]) for i in range(count)]


async def _run_prompts(server: str, name: str | None, texts: list[str], num_new_tokens: int) -> Timing:
    """Stream all prompts at once and time every token as it arrives; tokens that come together share the time."""
    timing = Timing(0.0)

    async def run(text: str) -> None:
        last = started
        stream = client.stream(
            text, temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True, timeout=REQUEST_SECONDS
        )
        async for chunk in stream:
            now = time.perf_counter()
            if last == started:
                timing.first_token_seconds.append(now - started)
            elif chunk.num_tokens:
                timing.inter_token_seconds += [(now - last) / chunk.num_tokens] * chunk.num_tokens
            last = now

    async with AsyncClient(server, model=name) as client:
        await client.is_ready()  # connects
        started = time.perf_counter()
        await asyncio.gather(*(run(text) for text in texts))
        timing.seconds = time.perf_counter() - started
    return timing


def _speeds(cases: dict[str, list[Timing]]) -> dict[str, float]:
    seconds = {case: median(timing.seconds for timing in group) for case, group in cases.items()}
    return {
        "one_stream": 128 / (seconds["one_all"] - seconds["one_first"]),
        "streams_16": NUM_STREAMS * 64 / seconds["streams_all"],
    }
