"""Measure 4-bit weights beside 8-bit ones: kernels, whole decoder steps, quality and bytes; appends rows.

    python benchmarks/run_int4.py                                                   # kernels alone
    python benchmarks/run_int4.py --int4 build/smollm2-int4 --int8 build/smollm2-int8
    python benchmarks/run_int4.py --whole build/smollm2-int4-whole --int8 build/smollm2-int8 --processor-time

`--whole` is an artifact whose groups have whole numbers for scales (scales="whole"). With `--processor-time` the rows'
names begin with `processor_`: one thread's time, which other work on the machine disturbs less. Without AVX-512 those
of speeds begin with `avx2/`.

Rounds are interleaved, medians are kept. Weights of few rows come from memory: they are larger than the last-level
cache. Quality is what the run that made the artifact measured on held-out text, and stands in its report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from lib.level import at_level
from lib.models import say, warn_if_busy
from lib.processor_time import add_processor_time, clock_of
from lib.rows import RESULTS, Row, append, new_row
from run_kernels import BLOCK_SIZE, READ, Case, Rounds, random_int8, reading

from penjing.compress.report.schema import read_report
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.packing import Panels

INPUTS, GROUP = 2048, 64
COLD_OUTPUTS = (128 << 20) // INPUTS
EIGHT = "INT8 layer of the same shape"
FOUR, HALF = "int4_linear", "int4_linear_bf16"  # of activations in INT8 and in bfloat16
WHOLE = "int4_linear_whole"  # of groups whose scales are whole numbers
BESIDE = {FOUR: EIGHT, HALF: "the same layer with INT8 activations", WHOLE: EIGHT}
Now = Callable[[], float]
EIGHT_STEP = "the INT8 artifact"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="0: no speed, bytes and quality of the artifacts alone")
    parser.add_argument("--int4", type=Path, help="an artifact with 4-bit weights")
    parser.add_argument("--whole", type=Path, help='the same with scales="whole"')
    parser.add_argument("--int8", type=Path, help="an INT8 artifact of the same network")
    add_processor_time(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    kernels = extension()
    if kernels is None:
        raise SetupError("the C++ kernels are not built; install a C++17 compiler and run pip install -e . again")
    fours = {"": arguments.int4, "whole_": arguments.whole}
    fours = {name: folder for name, folder in fours.items() if folder is not None}
    if bool(fours) != (arguments.int8 is not None):
        raise SetupError("--int4 or --whole, and --int8 go together: their steps are timed in turns")
    now = clock_of(arguments)
    rows: list[Row] = []
    with torch.inference_mode():
        if arguments.rounds:
            if arguments.processor_time:
                kernels.set_num_threads(1)
            else:
                warn_if_busy()
            torch.set_num_threads(kernels.num_threads)
            say(f"{kernels.isa}, {kernels.num_threads} threads")
            rows += [*few_rows(kernels, arguments.rounds, now), *many_rows(kernels, arguments.rounds, now)]
            if fours:
                rows += step_rows(kernels, fours, arguments.int8, arguments.rounds, now)
        for name, folder in fours.items():
            rows += artifact_rows(folder, arguments.int8, name)
    rows = at_level(rows, ("int4_linear", "decoder_step"), "processor_" if arguments.processor_time else "")
    append("int4", rows, arguments.results)
    return 0


def row(
    metric: str,
    value: float,
    unit: str,
    runs: int,
    baseline: str | None = None,
    baseline_value: float | None = None,
    share_of_limit: float | None = None,
) -> Row:
    return new_row(
        "int4",
        metric,
        value,
        unit,
        runs=runs,
        baseline=baseline,
        baseline_value=baseline_value,
        share_of_limit=share_of_limit,
    )


def random_int4(kernels: CpuExtension, outputs: int, inputs: int, half_inputs: bool = False) -> Panels:
    generator = torch.Generator().manual_seed(inputs)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (outputs, inputs // 8), dtype=torch.int32, generator=generator)
    scales = (torch.rand(outputs, inputs // GROUP, generator=generator) * 0.01).bfloat16()
    return kernels.prepack_int4([(words, scales, None, None)], GROUP, half_inputs=half_inputs)


def random_whole(kernels: CpuExtension, outputs: int, inputs: int) -> Panels:
    generator = torch.Generator().manual_seed(inputs)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (outputs, inputs // 8), dtype=torch.int32, generator=generator)
    steps = torch.randint(8, 17, (outputs, inputs // GROUP, 2), dtype=torch.int8, generator=generator)
    return kernels.prepack_stepped([(words, torch.rand(outputs), steps, None)], GROUP)


def random_fours(kernels: CpuExtension, outputs: int, inputs: int) -> dict[str, Panels]:
    """A layer in each form of 4-bit weights."""
    floats = {name: random_int4(kernels, outputs, inputs, name == HALF) for name in (FOUR, HALF)}
    return floats | {WHOLE: random_whole(kernels, outputs, inputs)}


def few_rows(kernels: CpuExtension, rounds: int, now: Now) -> list[Row]:
    """Weights a second of layers of few rows on cold weights; the limit of one row is reading its bytes."""
    eight = kernels.prepack_int8(random_int8(COLD_OUTPUTS, INPUTS, seed=0), torch.rand(COLD_OUTPUTS))
    fours = random_fours(kernels, COLD_OUTPUTS, INPUTS)
    weights, few = COLD_OUTPUTS * INPUTS / 1e9, (1, 2, 4, 8, 16)
    cases = {READ: reading(kernels)}
    for m in few:
        x = torch.randn(m, INPUTS)
        for name, four in fours.items():
            cases[f"{name} {m}"] = Case(lambda x=x, four=four: kernels.int4_linear(x, four), weights, 2)
        cases[f"eight {m}"] = Case(lambda x=x: kernels.int8_linear(x, eight), weights, 2)
    rate = Rounds(cases, rounds, now).rate
    limits = {name: rate[READ] / (four.memory.nbytes / weights / 1e9) for name, four in fours.items()}
    return [
        row(
            f"{name}_{m}_rows",
            rate[f"{name} {m}"],
            "Gweights/s",
            rounds,
            BESIDE[name],
            rate[f"{'eight' if BESIDE[name] == EIGHT else FOUR} {m}"],
            rate[f"{name} {m}"] / limits[name] if m == 1 else None,
        )
        for name in fours
        for m in few
    ]


def many_rows(kernels: CpuExtension, rounds: int, now: Now) -> list[Row]:
    """Layers of many rows, as prefill has them, in products a second."""
    cases: dict[str, Case] = {}
    shapes = [(128, 576, 3072), (512, 576, 3072), (512, 1536, 576)]
    for m, k, n in shapes:
        x, work = torch.randn(m, k), 2e-9 * m * k * n
        eight = kernels.prepack_int8(random_int8(n, k, seed=k), torch.rand(n))
        for name, four in random_fours(kernels, n, k).items():
            cases[f"{name} {m}x{k}x{n}"] = Case(lambda x=x, four=four: kernels.int4_linear(x, four), work, 1)
        cases[f"eight {m}x{k}x{n}"] = Case(lambda x=x, eight=eight: kernels.int8_linear(x, eight), work, 1)
    rate = Rounds(cases, 4 * rounds, now).rate
    sizes = [f"{m}x{k}x{n}" for m, k, n in shapes]
    return [
        row(
            f"{name}_{size}",
            rate[f"{name} {size}"],
            "GOP/s",
            4 * rounds,
            BESIDE[name],
            rate[f"{'eight' if BESIDE[name] == EIGHT else FOUR} {size}"],
        )
        for name in BESIDE
        for size in sizes
    ]


def step_rows(kernels: CpuExtension, fours: dict[str, Path], eight: Path, rounds: int, now: Now) -> list[Row]:
    """Whole decoder steps of the artifacts in turns."""
    cases = {READ: reading(kernels)}
    read_bytes: dict[str, float] = {}
    for name, folder in (*fours.items(), ("eight", eight)):
        model = load_model(folder).model
        step, config = fuse_decoder(model), model.config
        if step is None:
            raise SetupError(f"{folder} does not run as fused steps")
        shape = (config.num_hidden_layers, 2, 256, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
        pool = kernels.empty_pages(shape, torch.float32).normal_()
        for what, sequences, context in (("one_stream", 1, 128), ("16_streams", 16, 160)):
            blocks = -(-context // BLOCK_SIZE)
            table = torch.arange(sequences * blocks).int().view(sequences, blocks)
            slots = table[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
            lengths, each = torch.full((sequences,), context).int(), torch.arange(sequences + 1).int()
            ids = torch.randint(0, config.vocab_size, (sequences,)).int()
            inputs = (ids, lengths - 1, slots, each, lengths, table, each[:-1].clone(), pool)
            cases[f"{name} {what}"] = Case(lambda step=step, a=inputs: step.step(*a), sequences, 4)
        read_bytes[name] = step.weight_bytes
        position = torch.arange(512)
        inputs = (
            torch.randint(0, config.vocab_size, (512,)).int(), position.int(), position, torch.tensor([0, 512]).int(),
            torch.tensor([512]).int(), torch.arange(512 // BLOCK_SIZE).int()[None].contiguous(),
            torch.tensor([511]).int(), pool,
        )  # fmt: skip
        cases[f"{name} prefill_512"] = Case(lambda step=step, a=inputs: step.step(*a), 512, 1)
    rate = Rounds(cases, rounds, now).rate
    rows = []
    for name in fours:
        for what in ("one_stream", "16_streams", "prefill_512"):
            ours, beside = rate[f"{name} {what}"], rate[f"eight {what}"]
            share = ours * read_bytes[name] / 1e9 / rate[READ] if what == "one_stream" else None
            rows.append(row(f"decoder_step_{name}{what}", ours, "tok/s", rounds, EIGHT_STEP, beside, share))
    return rows


def artifact_rows(four: Path, eight: Path, name: str) -> list[Row]:
    """Bytes, and the perplexity beside the network that the artifact was made of."""
    report, beside = read_report(four), read_report(eight)
    quality, before = report.last.quality, report.first.quality
    rows = [
        row(f"{name}artifact_size", report.last.size.bytes / 1e6, "MB", 1, EIGHT_STEP, beside.last.size.bytes / 1e6)
    ]
    for part, was in zip(quality.parts, before.parts, strict=True):
        rows.append(row(f"{name}perplexity_{part.name}", part.value, "perplexity", 1, "FP32", was.value))
    read = []
    for folder in (four, eight):
        step = fuse_decoder(load_model(folder).model)
        if step is None:
            raise SetupError(f"{folder} does not run as fused steps")
        read.append(step.weight_bytes / 1e6)
    return [*rows, row(f"{name}weights_read_a_step", read[0], "MB", 1, EIGHT_STEP, read[1])]


if __name__ == "__main__":
    sys.exit(guarded(main))
