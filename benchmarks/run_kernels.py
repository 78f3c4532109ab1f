"""Measure the kernels beside torch and beside what the memory allows: interleaved rounds, medians; appends rows.

    python benchmarks/run_kernels.py --device cpu
    python benchmarks/run_kernels.py --device cpu --model build/smollm2-int8    # decoder steps too
    python benchmarks/run_kernels.py --device cpu --parts float
    python benchmarks/run_kernels.py --device cuda

Operands are random (zeros run faster) and, where memory is the limit, larger than the last-level cache. Quantization of
the activations is part of the time of every INT8 layer, and not of torch._int_mm's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import run_kernels_gpu
import torch
import torch.nn.functional as F
from lib.level import at_level
from lib.models import say, warn_if_busy
from lib.rows import RESULTS, Row, append, new_row
from torch import Tensor

from penjing.core.checkpoint.load import load_model
from penjing.core.cli import guarded
from penjing.core.errors import SetupError
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import CpuExtension

COLD_BYTES = 128 << 20  # more than the last-level cache
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
GEMM_SHAPES = [(576, 960), (576, 3072), (1536, 576), (2048, 2048)]
PEER_MM = f"torch._int_mm {torch.__version__}"
PEER_SDPA = f"torch scaled_dot_product_attention {torch.__version__}"
int_mm = torch.ops.aten._int_mm.default
READ = "read bandwidth in huge pages"


@dataclass
class Case:
    """One thing to time; `work` of its unit are done in each call."""

    run: Callable[[], object]
    work: float
    calls: int


class Rounds:
    """Times cases in turn, so that a change of the machine's speed meets all of them."""

    def __init__(self, cases: dict[str, Case], rounds: int, now: Callable[[], float] = time.perf_counter):
        samples: dict[str, list[float]] = {name: [] for name in cases}
        for case in cases.values():
            case.run()
        for _ in range(rounds):
            for name, case in cases.items():
                # The workers of torch's OpenMP spin for some milliseconds after a call; another team would share its
                # cores with them.
                time.sleep(0.02)
                start = now()
                for _ in range(case.calls):
                    case.run()
                samples[name].append(case.work * case.calls / (now() - start))
        self.rate = {name: statistics.median(values) for name, values in samples.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: run_kernels_gpu.py")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="what is measured")
    parser.add_argument("--model", type=Path, help="an artifact whose decoder steps are measured too")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the rows")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        run_kernels_gpu.main(["--out", str(arguments.results / run_kernels_gpu.RESULTS.name)])
        return 0
    kernels = extension()
    if kernels is None:
        raise SetupError("the C++ kernels are not built; install a C++17 compiler and run pip install -e . again")
    warn_if_busy()
    torch.set_num_threads(kernels.num_threads)
    say(f"{kernels.isa}, {kernels.num_threads} threads")
    with torch.inference_mode():
        rows = [found for part in arguments.parts for found in PARTS[part](kernels, arguments.rounds)]
        if arguments.model is not None:
            rows += step_rows(kernels, arguments.model, arguments.rounds)
    append("kernels_cpu", at_level(rows), arguments.results)
    return 0


def row(
    metric: str,
    value: float,
    unit: str,
    rounds: int,
    baseline: str | None = None,
    baseline_value: float | None = None,
    share_of_limit: float | None = None,
) -> Row:
    return new_row(
        "kernels_cpu",
        metric,
        value,
        unit,
        runs=rounds,
        baseline=baseline,
        baseline_value=baseline_value,
        share_of_limit=share_of_limit,
    )


def random_int8(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)


def reading(kernels: CpuExtension) -> Case:
    memory = kernels.empty_pages((COLD_BYTES,), torch.uint8)
    memory.random_(0, 256)
    return Case(lambda: kernels.read(memory), COLD_BYTES / 1e9, 4)


def gemv_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """INT8 layers of few rows on weights from memory, against the speed of reading it and the rate of a large product.

    The limit of m rows is whichever of the two comes first: a weight read is multiplied m times.
    """
    small_pages = torch.empty(COLD_BYTES, dtype=torch.uint8).random_(0, 256)
    k = 2048
    panels = kernels.prepack_int8(random_int8(COLD_BYTES // k, k, seed=0), torch.rand(COLD_BYTES // k))
    q, w = random_int8(512, k, seed=1), random_int8(k, k, seed=2)
    cases = {
        READ: reading(kernels),
        "small": Case(lambda: kernels.read(small_pages), COLD_BYTES / 1e9, 4),
        PEER_MM: Case(lambda: int_mm(q, w.t()), 2e-9 * 512 * k * k, 2),
    }
    few = (1, 2, 4, 16)
    for m in few:
        x = torch.randn(m, k)
        cases[str(m)] = Case(lambda x=x: kernels.int8_linear(x, panels), COLD_BYTES / 1e9, 4)
    rate = Rounds(cases, rounds).rate
    read = rate[READ]
    rows = [
        row("read_bandwidth", read, "GB/s", rounds),
        row("read_bandwidth_4k_pages", rate["small"], "GB/s", rounds, share_of_limit=rate["small"] / read),
    ]
    for m in few:
        limit = min(read, rate[PEER_MM] / (2 * m))
        rows.append(row(f"int8_linear_{m}_rows", rate[str(m)], "GB/s", rounds, READ, read, rate[str(m)] / limit))
    return rows


def float_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """Layers in float32 on weights from memory, beside torch's."""
    k = 2048
    weight = torch.randn(COLD_BYTES // 4 // k, k)
    peer, cases = f"torch linear {torch.__version__}", {READ: reading(kernels)}
    for m in (1, 4, 8, 16, 32, 128):
        x = torch.randn(m, k)
        work = 2e-9 * m * weight.numel()
        cases[str(m)] = Case(lambda x=x: kernels.linear(x, weight), work, 2)
        cases[f"torch {m}"] = Case(lambda x=x: F.linear(x, weight), work, 2)
    rate = Rounds(cases, rounds).rate
    return [
        row(f"float_linear_{m}_rows", rate[m], "GFLOP/s", rounds, peer, rate[f"torch {m}"])
        for m in cases
        if m.isdigit()
    ]


def elementwise_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """A norm or a gate, fused with quantization, in bytes read and written, against copying memory."""
    hidden, inner = 576, 1536
    x, gate, up = (torch.randn(COLD_BYTES // 4 // k, k) for k in (hidden, inner, inner))
    weight, copy = torch.rand(hidden), torch.empty_like(x)
    copying = f"torch copy_ {torch.__version__}"
    cases = {
        copying: Case(lambda: copy.copy_(x), 8 * x.numel() / 1e9, 2),
        "rms_norm_quantize": Case(lambda: kernels.rms_norm_quantize(x, weight, 1e-5), 5 * x.numel() / 1e9, 2),
        "swiglu_quantize": Case(lambda: kernels.swiglu_quantize(gate, up), 9 * gate.numel() / 1e9, 2),
    }
    rate = Rounds(cases, rounds).rate
    limit = rate.pop(copying)
    return [row(name, value, "GB/s", rounds, copying, limit, value / limit) for name, value in rate.items()]


def gemm_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """INT8 layers of many rows, quantization and epilogue included, against torch's bare product."""
    cases: dict[str, Case] = {}
    for k, n in GEMM_SHAPES:
        weight = random_int8(n, k, seed=k)
        panels = kernels.prepack_int8(weight, torch.rand(n))
        for m in (8, 16, 32, 64, 128, 512):
            x, q = torch.randn(m, k), random_int8(m, k, seed=m)
            work = 2e-9 * m * k * n
            calls = max(1, int(5 / work))
            cases[f"{m}x{k}x{n}"] = Case(lambda x=x, panels=panels: kernels.int8_linear(x, panels), work, calls)
            cases[f"torch {m}x{k}x{n}"] = Case(lambda q=q, w=weight: int_mm(q, w.t()), work, calls)
    rate = Rounds(cases, rounds).rate
    limit = max(value for name, value in rate.items() if name.startswith("torch"))
    return [
        row(f"int8_linear_{name}", rate[name], "GOP/s", rounds, PEER_MM, rate[f"torch {name}"], rate[name] / limit)
        for name in cases
        if not name.startswith("torch")
    ]


def paged(kernels: CpuExtension, sequences: int, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and a block table whose blocks lie at random."""
    blocks = -(-context // BLOCK_SIZE)
    k, v = (
        kernels.empty_pages((sequences * blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.float32).normal_()
        for _ in range(2)
    )
    table = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(0)).int()
    return k, v, table.view(sequences, blocks)


def decode_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """One query a sequence over long contexts, against the speed of reading the keys and values.

    Keys lie by dimension, as they do in serving.
    """
    cases = {READ: reading(kernels)}
    for sequences, context in ((24, 4096), (1, 98304), (160, 512)):
        k, v, table = paged(kernels, sequences, context)
        q = torch.randn(sequences, HEADS, HEAD_DIM)
        arguments = (q, k, v, torch.arange(sequences + 1).int(), torch.full((sequences,), context).int(), table, 0.125)
        work = 2 * k.numel() * 4 / 1e9
        cases[f"{sequences}x{context}"] = Case(lambda a=arguments: kernels.paged_attention(*a, turned=True), work, 2)
    rate = Rounds(cases, rounds).rate
    limit = rate.pop(READ)
    return [
        row(f"paged_decode_{name}", value, "GB/s", rounds, READ, limit, value / limit) for name, value in rate.items()
    ]


def prefill_rows(kernels: CpuExtension, rounds: int) -> list[Row]:
    """Causal attention of a whole prompt over pages, against torch on contiguous tensors."""
    cases: dict[str, Case] = {}
    for tokens in (128, 512, 2048):
        k, v, table = paged(kernels, 1, tokens)
        q = torch.randn(tokens, HEADS, HEAD_DIM)
        arguments = (q, k, v, torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), table, 0.125)
        q_dense, k_dense, v_dense = (torch.randn(1, heads, tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        work = 2e-9 * HEADS * HEAD_DIM * tokens * (tokens + 1)
        calls = max(1, int(1 / work))
        cases[str(tokens)] = Case(lambda a=arguments: kernels.paged_attention(*a, turned=True), work, calls)
        cases[f"torch {tokens}"] = Case(
            lambda q=q_dense, k=k_dense, v=v_dense: F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            ),
            work,
            calls,
        )
    rate = Rounds(cases, rounds).rate
    return [
        row(f"paged_prefill_{name}", rate[name], "GFLOP/s", rounds, PEER_SDPA, rate[f"torch {name}"])
        for name in cases
        if not name.startswith("torch")
    ]


def step_rows(kernels: CpuExtension, folder: Path, rounds: int) -> list[Row]:
    """Whole decoder steps of a model; the limit of a decode step is one reading of its weights, keys and values."""
    model = load_model(folder).model
    step, config = fuse_decoder(model), model.config
    if step is None:
        raise SetupError(f"{folder} does not run as fused steps")
    pool_shape = (config.num_hidden_layers, 2, 512, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
    pool = kernels.empty_pages(pool_shape, torch.float32).normal_()
    cases = {READ: reading(kernels)}
    read_bytes = {}
    for name, sequences, context in (("one_stream", 1, 128), ("16_streams", 16, 160)):
        blocks = -(-context // BLOCK_SIZE)
        table = torch.arange(sequences * blocks).int().view(sequences, blocks)
        slots = table[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
        lengths = torch.full((sequences,), context).int()
        each = torch.arange(sequences + 1).int()
        ids = torch.randint(0, config.vocab_size, (sequences,)).int()
        arguments = (ids, lengths - 1, slots, each, lengths, table, each[:-1].clone(), pool)
        cases[name] = Case(lambda a=arguments: step.step(*a), sequences, 8)
        token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
        read_bytes[name] = (step.weight_bytes + sequences * context * token_bytes) / sequences
    position = torch.arange(512)
    ids = torch.randint(0, config.vocab_size, (512,)).int()
    arguments = (
        ids, position.int(), position, torch.tensor([0, 512]).int(), torch.tensor([512]).int(),
        torch.arange(512 // BLOCK_SIZE).int()[None].contiguous(), torch.tensor([511]).int(), pool,
    )  # fmt: skip
    cases["prefill_512"] = Case(lambda a=arguments: step.step(*a), 512, 1)
    rate = Rounds(cases, rounds).rate
    limit = rate.pop(READ) * 1e9
    return [
        row(
            f"decoder_step_{name}",
            value,
            "tok/s",
            rounds,
            share_of_limit=value * read_bytes[name] / limit if name in read_bytes else None,
        )
        for name, value in rate.items()
    ]


PARTS: dict[str, Callable[[CpuExtension, int], list[Row]]] = {
    "few": gemv_rows,
    "many": gemm_rows,
    "float": float_rows,
    "elementwise": elementwise_rows,
    "decode": decode_rows,
    "prefill": prefill_rows,
}

if __name__ == "__main__":
    sys.exit(guarded(main))
