"""Measure one instruction set beside another: layers, and whole steps of artifacts; appends rows.

    python benchmarks/run_levels.py                                                        # layers alone
    python benchmarks/run_levels.py --int8 build/smollm2-int8 --int4 build/smollm2-int4    # steps too

Time is processor time of one thread, so that a machine that others use changes less; levels take turns, medians are
kept, and the levels' results are compared bit by bit before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from lib.models import say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from run_kernels import BLOCK_SIZE, random_int8

from penjing.core.checkpoint.load import load_model
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import ISAS, CpuExtension

ONE_DNN = f"torch._int_mm {torch.__version__}"
SHAPES = [(960, 576), (3072, 576), (576, 1536), (2048, 2048)]
ROWS = (16, 64, 256)
int_mm = torch.ops.aten._int_mm.default


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--level", choices=ISAS, default="amx", help="what is measured")
    parser.add_argument("--beside", choices=ISAS, default="avx512_vnni", help="what it is compared with")
    parser.add_argument("--int8", type=Path, help="an INT8 artifact of a decoder")
    parser.add_argument("--int4", type=Path, help="an artifact with 4-bit weights")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    kernels = extension()
    if kernels is None:
        raise SetupError("the C++ kernels are not built; install a C++17 compiler and run pip install -e . again")
    levels = arguments.level, arguments.beside
    try:
        for level in levels:
            kernels.select_isa(level)
    except ValueError as error:
        raise SetupError(str(error)) from None
    warn_if_busy()
    kernels.set_num_threads(1)
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = layer_rows(kernels, levels, arguments.rounds)
        for kind in ("int8", "int4"):
            if getattr(arguments, kind) is not None:
                rows += step_rows(kernels, levels, kind, getattr(arguments, kind), arguments.rounds)
    append("levels", rows, arguments.results)
    return 0


def speeds(
    kernels: CpuExtension,
    levels: tuple[str, str],
    run: Callable[[], object],
    work: float,
    rounds: int,
    other: Callable[[], object] | None = None,
) -> list[float]:
    """Medians of work a second of processor time: of each level and, last, of another program's function."""
    contestants = [(level, run) for level in levels] + ([] if other is None else [(levels[0], other)])
    samples: list[list[float]] = [[] for _ in contestants]
    for turn in range(rounds + 1):
        for (level, function), speed in zip(contestants, samples, strict=True):
            kernels.select_isa(level)
            calls, start = 0, time.thread_time()
            while calls == 0 or time.thread_time() - start < 0.02:
                function()
                calls += 1
            if turn:  # the first one warms up
                speed.append(work * calls / (time.thread_time() - start))
    return [statistics.median(speed) for speed in samples]


def layer_rows(kernels: CpuExtension, levels: tuple[str, str], rounds: int) -> list[Row]:
    """INT8 layers whose weights are in the cache, quantization of the activations included, and oneDNN's product."""
    found = []
    for n, k in SHAPES:
        weight = random_int8(n, k, seed=n)
        panels = kernels.prepack_int8(weight, torch.rand(n) * 1e-3)
        for m in ROWS:
            x, q, work = torch.randn(m, k), random_int8(m, k, seed=m), 2e-12 * m * n * k
            results = []
            for level in levels:
                kernels.select_isa(level)
                results.append(kernels.int8_linear(x, panels))
            if not torch.equal(*results):
                raise SetupError(f"{m}x{k}x{n}: {levels[0]} and {levels[1]} differ")

            layer, peer = partial(kernels.int8_linear, x, panels), partial(int_mm, q, weight.t())
            own, beside, theirs = speeds(kernels, levels, layer, work, rounds, peer)
            name = f"{levels[0]}_int8_{m}x{k}x{n}"
            found += [
                row(name, own, "TOPS", rounds, levels[1], beside),
                row(name, own, "TOPS", rounds, ONE_DNN, theirs),
            ]
    return found


def step_rows(kernels: CpuExtension, levels: tuple[str, str], kind: str, folder: Path, rounds: int) -> list[Row]:
    """Decode steps of 160 tokens of context each, and a prompt of 512 tokens."""
    say(f"{kind}: {folder}")
    model = load_model(folder).model
    step, config = fuse_decoder(model), model.config
    if step is None:
        raise SetupError(f"{folder} does not run as fused steps")
    shape = (config.num_hidden_layers, 2, 256, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
    pool = kernels.empty_pages(shape, torch.float32).normal_()
    found = []
    for name, sequences, new, context in (
        ("one_stream", 1, 1, 160),
        ("16_streams", 16, 1, 160),
        ("prefill_512", 1, 512, 512),
    ):
        blocks = context // BLOCK_SIZE
        table = torch.arange(sequences * blocks).int().view(sequences, blocks)
        positions = torch.arange(context - new, context).repeat(sequences)
        slots = table.long().repeat_interleave(new, 0).gather(1, positions[:, None] // BLOCK_SIZE)[:, 0]
        slots = slots * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = (torch.arange(sequences + 1) * new).int()
        ids = torch.randint(0, config.vocab_size, (sequences * new,)).int()
        lengths = torch.full((sequences,), context).int()
        run = partial(step.step, ids, positions.int(), slots, starts, lengths, table, starts[1:] - 1, pool)
        own, beside = speeds(kernels, levels, run, sequences * new, rounds)
        found.append(row(f"{levels[0]}_{kind}_{name}", own, "tok/s", rounds, levels[1], beside))
    return found


def row(metric: str, value: float, unit: str, runs: int, baseline: str, baseline_value: float) -> Row:
    return new_row("levels", metric, value, unit, runs=runs, baseline=baseline, baseline_value=baseline_value)


if __name__ == "__main__":
    sys.exit(guarded(main))
