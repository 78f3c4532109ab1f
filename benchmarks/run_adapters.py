"""Measure what adapters cost 16 answers of one engine, in process; appends rows.

    OMP_NUM_THREADS=1 python benchmarks/run_adapters.py          # some minutes

`decode_16_…` are tokens a second of 16 greedy answers: each of the adapters has two of them, or one adapter has all.
`wide` ones are of rank 16 on all seven linear layers of each block, `narrow` ones of rank 8 on q_proj and v_proj, as
PEFT chooses them by itself. `prompt_…` are tokens a second of reading prompts of 240 tokens. Seconds are those of
processor time on one thread, which other programs disturb less than those of a clock. The baseline is the same engine
with the same answers and no adapter. The matrices are random: speed does not depend on their values. Contestants are
interleaved; rows are medians of the rounds.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from lib.level import at_level
from lib.models import add_arguments, make_models, say, warn_if_busy
from lib.rows import RESULTS, append, new_row

from penjing.core.checkpoint.load import load_model
from penjing.core.cli import guarded
from penjing.core.models.config import DecoderConfig
from penjing.kernels.low_rank import PROJECTIONS, LowRank, Pairs
from penjing.serve.engine.config import EngineConfig
from penjing.serve.engine.engine import LLMEngine
from penjing.serve.engine.request import Request
from penjing.serve.runner.load import make_engine
from penjing.serve.sampling.params import SamplingParams

NUM_ADAPTERS, NUM_ANSWERS, NEW_TOKENS, PROMPT = 8, 16, 24, 240
BESIDE = tuple(name for name in PROJECTIONS if name != "head_gate")
KINDS: dict[str, tuple[int, tuple[str, ...], torch.dtype]] = {
    "wide": (16, BESIDE, torch.bfloat16),
    "narrow": (8, ("q", "v"), torch.bfloat16),
    "wide_float32": (16, BESIDE, torch.float32),
}
CONTESTANTS: dict[str, tuple[str | None, int]] = {
    "none": (None, 0),
    "8_wide": ("wide", 8),
    "8_narrow": ("narrow", 8),
    "8_wide_float32": ("wide_float32", 8),
    "1_wide": ("wide", 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    _, artifact = make_models(arguments.checkpoint, arguments.model)
    warn_if_busy()
    loaded = load_model(artifact)
    adapters = {
        f"{kind}_{number}": random_pairs(loaded.config, *KINDS[kind], seed=number)
        for kind in KINDS
        for number in range(NUM_ADAPTERS)
    }
    config = EngineConfig(enable_prefix_caching=False, max_num_sequences=NUM_ANSWERS, max_step_seconds=0.0)
    engine = make_engine(loaded, config, adapters)
    found: dict[str, list[float]] = {}
    for turn in range(arguments.rounds + 1):
        for name, asked in CONTESTANTS.items():
            for what, measure in (("decode_16", decode), ("prompt", prompt)):
                value = measure(engine, *asked)
                if turn > 0:  # the first turn warms up
                    found.setdefault(f"{what}_{name}", []).append(value)
        say(f"round {turn}/{arguments.rounds}")
    medians = {name: median(values) for name, values in found.items()}
    rows = [
        new_row(
            "adapters", f"{what}_{name}", medians[f"{what}_{name}"], "tok/s", runs=arguments.rounds,
            baseline="no adapter", baseline_value=medians[f"{what}_none"],
        )
        for what in ("decode_16", "prompt")
        for name in CONTESTANTS
        if name != "none"
    ]  # fmt: skip
    append("adapters", at_level(rows), arguments.results)
    return 0


def random_pairs(config: DecoderConfig, rank: int, of: tuple[str, ...], dtype: torch.dtype, seed: int) -> Pairs:
    """Small random matrices beside the layers `of` each block."""
    queries, values = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {"q": (queries, hidden), "k": (values, hidden), "v": (values, hidden), "out": (hidden, queries)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    generator = torch.Generator().manual_seed(seed)

    def pair(outputs: int, inputs: int) -> LowRank:
        a_RK, b_NR = (torch.randn(size, generator=generator) * 0.01 for size in ((rank, inputs), (outputs, rank)))
        return LowRank(a_RK.to(dtype), b_NR.to(dtype), 2.0)

    return [{name: pair(*shapes[name]) for name in of} for _ in range(config.num_hidden_layers)]


def ask(engine: LLMEngine, kind: str | None, count: int, length: int, new_tokens: int) -> None:
    """Queue the answers, each `count`-th of which has the same adapter."""
    for number in range(NUM_ANSWERS):
        adapter = None if kind is None else f"{kind}_{number % count}"
        tokens = [100 + (7919 * number + 31 * position) % 40_000 for position in range(length)]
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, lora_name=adapter)
        engine.add(Request(f"{number}", tokens, params))


def decode(engine: LLMEngine, kind: str | None, count: int) -> float:
    """Tokens a second of 16 answers, prompts left out."""
    ask(engine, kind, count, 16, NEW_TOKENS)
    engine.step()
    started, tokens = time.process_time(), 0
    while engine.has_work():
        tokens += sum(len(output.token_ids) for output in engine.step())
    return tokens / (time.process_time() - started)


def prompt(engine: LLMEngine, kind: str | None, count: int) -> float:
    """Tokens a second of reading 16 prompts."""
    ask(engine, kind, count, PROMPT, 1)
    started = time.process_time()
    while engine.has_work():
        engine.step()
    return NUM_ANSWERS * PROMPT / (time.process_time() - started)


if __name__ == "__main__":
    sys.exit(guarded(main))
