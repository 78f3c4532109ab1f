"""Measure greedy decoding with and without a copy of the LM head in 4 bits (`kernels/screen.py`); appends rows.

    python benchmarks/run_screen.py build/smollm2-int8 build/gemma3-int4
    python benchmarks/run_screen.py build/gemma3-int4 --processor-time

Answers go on from Spanish, sayings and scripture, by which nothing was chosen, up to four at a time, a token with the
copy and a token without it in turns; they must be equal. Rows are medians over all tokens. `logits_from_the_head` are
those that may be the largest by the copy, a mean of the answers' last tokens. Heads for which the engine makes no copy
are measured too. With `--processor-time` rows' names begin with `processor_`: one thread's time, which other work on
the machine disturbs less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from lib.models import say, warn_if_busy
from lib.processor_time import add_processor_time, clock_of
from lib.rows import RESULTS, Row, append, new_row
from lib.texts import LATER, SOURCES
from torch import Tensor

from penjing.core.checkpoint.load import LoadedModel, load_model
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.runtime.fused import fuse_decoder
from penjing.core.runtime.screen import random_inputs
from penjing.kernels.cpu import extension
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.hadamard import hadamard
from penjing.kernels.int8_linear import PackedInt8, int8_linear
from penjing.kernels.quantize import quantize_per_token
from penjing.kernels.screen import Screen, make_screen, why_not_screened
from penjing.serve.runner.kv_pool import PagedCache, allocate_cache

TEXTS, PROMPT, ANSWER, PAGE = ("spanish", "sayings", "scripture"), 64, 64, 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", type=Path, nargs="+", help="INT8 or 4-bit artifacts whose LM head has 8 bits")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each text")
    add_processor_time(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    warn_if_busy()
    kernels, now = extension(), clock_of(arguments)
    if kernels is None:
        raise SetupError("the C++ kernels are not built; install a C++17 compiler and run pip install -e . again")
    prefix = "processor_" if arguments.processor_time else ""
    if arguments.processor_time:
        kernels.set_num_threads(1)
    say(f"{kernels.isa}, {kernels.num_threads} threads")
    rows: list[Row] = []
    for folder in arguments.artifacts:
        loaded = load_model(folder)
        steps = {"plain": fused(loaded, folder), "screened": fused(loaded, folder)}
        begun = time.perf_counter()
        head = getattr(loaded.model.lm_head, "packed", None)
        reason = why_not_screened(head, loaded.config.logit_cap)
        if not isinstance(head, PackedInt8) or reason is not None:
            raise SetupError(f"{folder}: {reason}")
        made = make_screen(head, random_inputs(steps["screened"], loaded.model))
        steps["screened"].screen(made)
        rows.append(row(f"{folder.name}/load", time.perf_counter() - begun, "s", 1))
        steps["plain"].keep_hidden()
        inputs: list[Tensor] = []
        for streams in (1, 2, 4):
            seconds: dict[str, list[float]] = {"plain": [], "screened": []}
            for text in TEXTS:
                ids = loaded.tokenizer.encode((SOURCES | LATER)[text].text(), allow_special=False)
                for turn in range(arguments.rounds):
                    begin = 997 * turn
                    prompts = [ids[begin + 331 * i :][:PROMPT] for i in range(streams)]
                    answer(loaded, steps, prompts, seconds, now)
                    hidden_RE = steps["plain"].hidden_RE
                    assert hidden_RE is not None  # `keep_hidden`
                    inputs.append(hidden_RE[:streams].clone())
                say(f"{folder.name}, {streams} streams: {text}")
            rate = {name: streams / median(each) for name, each in seconds.items()}
            name = f"{prefix}{folder.name}/{streams}_streams"
            runs = len(TEXTS) * arguments.rounds
            rows.append(row(name, rate["screened"], "tok/s", runs, rate["plain"]))
        count = likely_logits(made, head, torch.cat(inputs), loaded.config.table_hadamard)
        rows.append(row(f"{folder.name}/logits_from_the_head", count, "logits", len(inputs)))
    append("screen", rows, arguments.results)
    return 0


def fused(loaded: LoadedModel, folder: Path) -> DecoderStep:
    step = fuse_decoder(loaded.model)
    if step is None:
        raise SetupError(f"{folder} does not run as fused steps")
    return step


def likely_logits(made: Screen, head: PackedInt8, inputs_RE: Tensor, block: int) -> float:
    """How many logits may be the largest by the copy, a mean of the rows."""
    if block:
        inputs_RE = hadamard(inputs_RE, block)
    code_RE, scale_R = quantize_per_token(inputs_RE)
    part_RD = (code_RE.float() @ made.directions_DE.T * made.factors_D).round_().clamp_(-127, 127)
    rest_RE = code_RE - part_RD @ made.directions_DE
    reach_R = rest_RE.norm(dim=1) + made.beside * part_RD.norm(dim=1)
    # Whole numbers up to 127 are quantized as they are.
    rough_RV = int8_linear(torch.cat([code_RE.float(), part_RD], dim=1), made.rough)
    off_RV = reach_R[:, None] * made.lost_V
    known_R1 = int8_linear(inputs_RE, head).gather(1, rough_RV.argmax(dim=1, keepdim=True))
    return float(((rough_RV + off_RV) * scale_R[:, None] >= known_R1).sum(dim=1).float().mean())


def answer(
    loaded: LoadedModel,
    steps: dict[str, DecoderStep],
    prompts: list[list[int]],
    seconds: dict[str, list[float]],
    now: Callable[[], float],
) -> None:
    """Decode after the prompts with each step in turns, each in pages of its own."""
    config, count, pages = loaded.config, len(prompts), (PROMPT + ANSWER) // PAGE
    caches = {name: allocate_cache(config, count * pages, PAGE, "float16") for name in steps}
    last = {name: run(steps[name], torch.tensor(prompts), 0, caches[name]) for name in steps}
    for at in range(PROMPT, PROMPT + ANSWER - 1):
        for name in sorted(steps, reverse=at % 2 == 0):
            started = now()
            last[name] = run(steps[name], last[name][:, None], at, caches[name])
            seconds[name].append(now() - started)
        if not torch.equal(last["plain"], last["screened"]):
            raise AssertionError(f"token {at}: {last}")


def run(step: DecoderStep, ids_ST: Tensor, before: int, cache: PagedCache) -> Tensor:
    """(S,) the tokens that follow, of sequences with `before` tokens in their pages."""
    count, length = ids_ST.shape
    pages = cache.pool.shape[2] // count
    positions_ST = before + torch.arange(length).expand(count, length)
    table_SB = torch.arange(count * pages).view(count, pages)
    bounds_S1 = torch.arange(count + 1, dtype=torch.int32) * length
    return step.step_top(
        1,
        ids_ST.flatten().int(),
        positions_ST.flatten().int(),
        (table_SB[:, :1] * PAGE + positions_ST).flatten(),
        bounds_S1,
        torch.full((count,), before + length, dtype=torch.int32),
        table_SB.int(),
        bounds_S1[1:] - 1,
        cache.pool,
        row_pool=cache.rows,
    )[1][:, 0]


def row(metric: str, value: float, unit: str, runs: int, whole: float | None = None) -> Row:
    beside = None if whole is None else "the whole LM head"
    return new_row("screen", metric, value, unit, runs=runs, baseline=beside, baseline_value=whole)


if __name__ == "__main__":
    sys.exit(guarded(main))
