"""`penjing bench engine`: prefill, one stream and sixteen streams in this process, medians of interleaved runs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from penjing.core.errors import InputError
from penjing.core.progress import Progress, Silent
from penjing.core.text.corpus import heldout_tokens
from penjing.serve.bench.intervals import percentiles
from penjing.serve.engine.config import EngineConfig, with_defaults
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import load_engine
from penjing.serve.sampling.params import SamplingParams

NUM_STREAMS = 16
RUNS = 5


@dataclass
class Timing:
    """One run of some prompts, all submitted at once; seconds from the submission."""

    seconds: float
    first_token_seconds: list[float] = field(default_factory=list)  # of each prompt
    inter_token_seconds: list[float] = field(default_factory=list)  # between two tokens of one prompt
    largest_cache_share: float = 0.0
    cache_waste: float = 0.0  # share of the held token slots that held no token, when most were held


def bench_engine(
    folder: Path,
    runs: int = RUNS,
    progress: Progress | None = None,
    engine_config: EngineConfig | None = None,
) -> dict[str, Any]:
    """Load `folder` and measure.

    The figures, tokens per second unless named otherwise: `prefill_512` = 512 ÷ time of a 512-token prompt with one new
    token; `one_stream` = 128 ÷ (time of 129 − time of 1 new token after a prompt of 32); `streams_16` = 1024 ÷ time of
    16 prompts of 128 tokens with 64 new tokens each; `decode_only_16` = 16 × 63 ÷ (that time − time of 16 × (128 + 1)).
    The prefix cache is off: every run computes its whole prompts.

    Raises:
        InputError: the folder is no model, or its context or KV cache is shorter than 513 tokens.
    """
    config = with_defaults(engine_config, max_num_sequences=NUM_STREAMS)
    engine = load_engine(folder, config.model_copy(update={"enable_prefix_caching": False}))
    return bench(engine, runs, progress or Silent()) | {"model": str(folder)}


def bench(engine: LLMEngine, runs: int, progress: Progress) -> dict[str, Any]:
    """The figures of `bench_engine` for an engine without a prefix cache that has no work."""
    if engine.max_model_len < 513:
        raise InputError(f"the benchmark needs a context of 513 tokens, this engine has {engine.max_model_len}")
    tokens = heldout_tokens(engine.tokenizer, 1024 + 300 * NUM_STREAMS).tolist()
    short, long = tokens[:32], tokens[256 : 256 + 512]
    streams = [tokens[1024 + 300 * i : 1024 + 300 * i + 128] for i in range(NUM_STREAMS)]
    cases: dict[str, tuple[list[list[int]], int]] = {
        "prefill": ([long], 1),
        "one_first": ([short], 1),
        "one_all": ([short], 129),
        "streams_first": (streams, 1),
        "streams_all": (streams, 64),
    }
    progress.start("benchmark", (runs + 1) * len(cases))
    timings: dict[str, list[Timing]] = {name: [] for name in cases}
    for turn in range(runs + 1):
        for name, (prompts, num_new_tokens) in cases.items():
            timing = run_prompts(engine, prompts, num_new_tokens)
            if turn > 0:  # the first turn warms caches and pages up
                timings[name].append(timing)
            progress.advance()
    seconds = {name: median(timing.seconds for timing in group) for name, group in timings.items()}
    crowd, alone = timings["streams_all"], timings["one_all"]
    return {
        "tokens_per_second": {
            "prefill_512": 512 / seconds["prefill"],
            "one_stream": 128 / (seconds["one_all"] - seconds["one_first"]),
            "streams_16": NUM_STREAMS * 64 / seconds["streams_all"],
            "decode_only_16": NUM_STREAMS * 63 / (seconds["streams_all"] - seconds["streams_first"]),
        },
        "time_to_first_token_ms": {
            "prompt_32": 1000 * seconds["one_first"],
            "prompt_512": 1000 * seconds["prefill"],
            "streams_16": 1000 * median(value for timing in crowd for value in timing.first_token_seconds),
        },
        "inter_token_ms": {
            "one_stream": percentiles([value for timing in alone for value in timing.inter_token_seconds]),
            "streams_16": percentiles([value for timing in crowd for value in timing.inter_token_seconds]),
        },
        "kv_cache": {
            "dtype": engine.config.kv_dtype,
            "bytes": engine.config.kv_cache_bytes,
            "largest_share_used": max(timing.largest_cache_share for timing in crowd),
            "waste": max(timing.cache_waste for timing in crowd),
        },
        "speculation": _speculation(engine),
        "attention": engine.config.attention,
        "runs": runs,
        "scheme": engine.scheme,
        "device": engine.config.device,
        "dtype": engine.config.dtype,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": platform.machine(),
    }


def run_prompts(engine: LLMEngine, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> Timing:
    """Submit all prompts at once, greedily, and time every token."""
    params = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
    timing, last_seconds = Timing(0.0), [0.0] * len(prompts)
    num_used_most, size = 0, engine.config.block_size
    started = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add(Request(str(i), prompt, params))
    while engine.has_work():
        outputs = engine.step()
        now = time.perf_counter() - started
        for output in outputs:
            i = int(output.request_id)
            since = now - last_seconds[i]
            (timing.first_token_seconds if output.num_output_tokens == 1 else timing.inter_token_seconds).append(since)
            last_seconds[i] = now
        blocks, running = engine.scheduler.blocks, engine.scheduler.running
        num_used = blocks.num_usable - blocks.num_free
        if num_used > num_used_most:
            num_used_most = num_used
            timing.cache_waste = 1 - sum(sequence.num_computed_tokens for sequence in running) / (num_used * size)
    timing.seconds = time.perf_counter() - started
    timing.largest_cache_share = num_used_most / engine.scheduler.blocks.num_usable
    return timing


def _speculation(engine: LLMEngine) -> dict[str, Any]:
    """Of all runs: how many guessed tokens were checked, and how many of them were right."""
    stats = engine.stats()
    return {
        "drafter": engine.config.speculate,
        "draft_tokens": stats.spec_decode_num_draft_tokens,
        "accepted_tokens": stats.spec_decode_num_accepted_tokens,
        "tokens_a_step": stats.generation_tokens / stats.num_steps,
    }
