"""Measure the Triton-language kernels and the engine on a GPU beside torch's own and beside ceilings of the same run.

    python benchmarks/run_kernels_gpu.py [--out rows.jsonl] [--budget seconds]

Attention is here, the other operations in lib/kernels_gpu_ops.py, the engine in lib/engine_gpu.py; each part has its
share of the budget, and what it has no time for becomes a row that says so.

Needs torch and the Triton language alone (`PYTHONPATH=build/src` where penjing is not installed) and downloads nothing.
Contestants take turns on random data, medians count; the table comes last. Without a GPU each row says that it could
not be measured. Ceilings: `Tensor.copy_` for bandwidth, a bf16 product of 8192³ for the tensor cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as F
from lib.engine_gpu import engine_rows
from lib.head_start import HeadStart

from penjing.kernels.dispatch import cuda_refusal
from penjing.kernels.flash_attention import flash_attention, flash_attention_packed

RESULTS = Path(__file__).resolve().parent / "results" / "kernels_gpu.jsonl"
COPY, PRODUCT = "copy bandwidth", "bf16 product 8192³"


@dataclass(frozen=True)
class Metric:
    """What is measured: `run` does `work` (floating operations, or bytes) in one call."""

    name: str
    unit: str
    work: float
    ceiling: str | None
    setup: Callable[[], dict[str, Callable[[], Any]]]  # contestant → call; the first is ours, made where there is a GPU


def attention_metrics(batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[Metric]:
    """Causal forward and backward passes; 4 and 10 operations a score and dimension, half of the scores unseen."""
    flops = 2 * batch * heads * tokens * tokens * head_dim

    def draw() -> list[torch.Tensor]:
        shape = batch, tokens
        sizes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim))
        return [torch.randn(*shape, *s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in sizes]

    def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def forward() -> dict[str, Callable[[], Any]]:
        q, k, v = (x.detach() for x in draw())
        calls: dict[str, Callable[[], Any]] = {"penjing": lambda: flash_attention(q, k, v)}
        backends = torch.nn.attention.SDPBackend
        for backend in (backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION):

            def call(backend: Any = backend) -> Any:
                with torch.nn.attention.sdpa_kernel(backend):
                    return torch_attention(q, k, v)

            calls[f"torch {backend.name.lower()}"] = call
        return calls

    def backward() -> dict[str, Callable[[], Any]]:
        inputs = draw()
        grad = torch.randn(batch, tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        ours, theirs = flash_attention(*inputs), torch_attention(*inputs)
        return {
            "penjing": lambda: torch.autograd.grad(ours, inputs, grad, retain_graph=True),
            "torch": lambda: torch.autograd.grad(theirs, inputs, grad.transpose(1, 2), retain_graph=True),
        }

    name = f"causal hd{head_dim} {tokens // 1024}k {heads}/{kv_heads} heads"
    yield Metric(f"attention forward {name}", "TFLOP/s", flops, PRODUCT, forward)
    yield Metric(f"attention backward {name}", "TFLOP/s", 2.5 * flops, PRODUCT, backward)


def window_metric(tokens: int, window: int) -> Metric:
    """A window's operations alone count: no loss per operation against causal attention is the aim."""
    heads, head_dim = 16, 128
    scores = window * (window + 1) // 2 + (tokens - window) * window

    def setup() -> dict[str, Callable[[], Any]]:
        shape = 1, tokens, heads, head_dim
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        return {"penjing": lambda: flash_attention(q, k, v, window=window)} | flex_attention(q, k, v, window)

    name = f"attention forward window {window} hd{head_dim} {tokens // 1024}k"
    return Metric(name, "TFLOP/s", 4 * heads * scores * head_dim, PRODUCT, setup)


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> dict[str, Callable[[], Any]]:
    """torch's FlexAttention with the same mask, compiled at its first call."""
    from torch.nn.attention import flex_attention as flex

    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        return (key <= row) & (key > row - window)

    tokens = q.shape[1]
    mask = flex.create_block_mask(seen, None, None, tokens, tokens, device="cuda")
    compiled = torch.compile(flex.flex_attention)
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return {"torch flex_attention": lambda: compiled(q, k, v, block_mask=mask)}


def packed_metric(lengths: Sequence[int]) -> Metric:
    """Sequences of many lengths in one call: no loss per operation against one long one is the aim."""
    heads, head_dim = 16, 128

    def setup() -> dict[str, Callable[[], Any]]:
        q, k, v = (torch.randn(sum(lengths), heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        longest = max(lengths)
        return {"penjing": lambda: flash_attention_packed(q, k, v, ends, ends, longest, longest)}

    work = sum(2 * heads * length * length * head_dim for length in lengths)
    name = f"attention forward packed {min(lengths)} … {max(lengths)} tokens hd128"
    return Metric(name, "TFLOP/s", work, PRODUCT, setup)


def decode_metric(batch: int, context: int, int8: bool) -> Metric:
    """One token a sequence; the bytes of the keys, values and scales that it must read."""
    heads, kv_heads, head_dim, page = 32, 8, 128, 16
    token_bytes = 2 * kv_heads * (head_dim + 4 if int8 else 2 * head_dim)

    def setup() -> dict[str, Callable[[], Any]]:
        from penjing.kernels.gpu.paged_attention import paged_attention, segment_keys_for

        pages = context // page
        shape = batch * pages, kv_heads, page, head_dim
        scales: list[torch.Tensor] = []
        if int8:
            k, v = (torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8) for _ in range(2))
            scales = [torch.rand(shape[:3], device="cuda") / 127 for _ in range(2)]
        else:
            k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
        cu_query = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
        lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
        q = torch.randn(batch, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        arguments = (q, k, v, cu_query, lengths, table, head_dim**-0.5, None, *scales)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        keys = segment_keys_for(batch, kv_heads, context, processors)
        return {
            "penjing": lambda: paged_attention(*arguments),  # pyright: ignore[reportArgumentType]
            "penjing, splits by batch": lambda: paged_attention(*arguments, segment_keys=keys),  # pyright: ignore
        }

    name = f"paged decode {'INT8' if int8 else 'bf16'} batch {batch} context {context}"
    return Metric(name, "GB/s", batch * context * token_bytes, COPY, setup)


def metrics() -> Iterator[Metric]:
    """Ceilings first: the others are shares of them."""

    def copy() -> dict[str, Callable[[], Any]]:
        source = torch.randn(2**28, device="cuda")
        target = torch.empty_like(source)
        return {"torch": lambda: target.copy_(source)}

    def product() -> dict[str, Callable[[], Any]]:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return {"torch": lambda: a @ b}

    yield Metric(COPY, "GB/s", 2 * 4 * 2**28, None, copy)
    yield Metric(PRODUCT, "TFLOP/s", 2 * 8192**3, None, product)
    yield from attention_metrics(1, 16384, 16, 16, 128)
    yield from attention_metrics(1, 16384, 32, 32, 64)
    yield from attention_metrics(2, 8192, 32, 8, 128)
    yield window_metric(16384, 1024)
    yield packed_metric([1024 * i + 7 for i in range(1, 9)])
    for batch, context in ((1, 32768), (64, 4096), (256, 1024)):
        for int8 in (False, True):
            yield decode_metric(batch, context, int8)


def measure(
    calls: dict[str, Callable[[], Any]], seconds: float = 2.0, rounds: int = 20
) -> dict[str, tuple[float, int]]:
    """Contestant → (median seconds of a call, calls), in turns for `seconds`; those that cannot run are left out."""
    times: dict[str, list[float]] = {}
    for name, call in calls.items():
        try:
            for _ in range(3):
                call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            if name.startswith("penjing"):
                raise
            sys.stderr.write(f"{name} cannot run here: {str(error).splitlines()[0]}\n")
        else:
            times[name] = []
    began, lead = time.perf_counter(), HeadStart()
    for turn in range(rounds):
        if turn >= 3 and time.perf_counter() - began > seconds:
            break
        for name, found in times.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            lead.give()
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
    return {name: (statistics.median(found), len(found)) for name, found in times.items()}


def common() -> dict[str, Any]:
    """What every row says about where it was made."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": shlex.join(["python", "benchmarks/run_kernels_gpu.py"]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def attention_rows(budget: float, reason: str | None) -> Iterator[dict[str, Any]]:
    """One row a contestant that is ours and a ceiling; unmeasured ones carry the reason."""
    ceilings: dict[str, float] = {}
    seconds, began = budget / 2 / sum(1 for _ in metrics()), time.perf_counter()  # compiling takes the other half
    for metric in metrics():
        row = {"metric": metric.name, "unit": metric.unit}
        late = time.perf_counter() - began > budget
        if reason is not None or late:
            why = reason or f"the budget of {budget:.0f} s was spent"
            yield row | {"value": None, "reason": f"not measured: {why}", "runs": 0}
            continue
        factor = 1e12 if metric.unit == "TFLOP/s" else 1e9
        found = measure(metric.setup(), seconds)
        rate = {name: metric.work / median / factor for name, (median, _) in found.items()}
        peers = {name: value for name, value in rate.items() if name.startswith("torch")}
        if metric.ceiling is None:
            ceilings[metric.name] = rate["torch"]
        best = max(peers, key=lambda name: peers[name], default=None)
        for name, value in rate.items():
            if name.startswith("torch") and metric.ceiling is not None:
                continue
            mode = name.partition(", ")[2]
            found_row = row | {"metric": f"{metric.name} ({mode})" if mode else metric.name, "value": round(value, 3)}
            if metric.ceiling is not None:
                found_row["share_of_limit"] = round(value / ceilings[metric.ceiling], 4)
                if best is not None:
                    found_row |= {"baseline": f"{best} {torch.__version__}", "ratio": round(value / peers[best], 4)}
            yield found_row | {"runs": found[name][1]}
        torch.cuda.empty_cache()


def other_rows(budget: float, reason: str | None) -> Iterator[dict[str, Any]]:
    """The rows of lib/kernels_gpu_ops.py, which needs pydantic for them; a bare machine may not have it."""
    try:
        from lib.kernels_gpu_ops import op_rows
    except ImportError as error:
        why = reason or f"lib/kernels_gpu_ops.py needs {error.name}, which is not installed"
        yield {"metric": "other operations", "unit": "GB/s", "value": None, "reason": f"not measured: {why}", "runs": 0}
        return
    for row in op_rows(seconds=budget):
        yield json.loads(row.model_dump_json(exclude_none=True)) | {"value": row.value}


def main(arguments: Sequence[str] | None = None) -> None:
    """Append the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of rows to append to")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of measuring and compiling, all in all")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    reason = cuda_refusal()
    parts = [
        attention_rows(0.5 * options.budget, reason),
        other_rows(0.3 * options.budget, reason),
        engine_rows(reason),
    ]
    found = [{"benchmark": "kernels_gpu"} | common() | row for part in parts for row in part]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)
    width = max(len(row["metric"]) for row in found)
    for row in found:
        value = row["reason"] if row["value"] is None else f"{row['value']:10.1f} {row['unit']}"
        share = f"{row['share_of_limit']:7.0%} of ceiling" if "share_of_limit" in row else ""
        ratio = f"  {row['ratio']:5.2f}× {row['baseline']}" if "ratio" in row else ""
        print(f"{row['metric']:{width}}  {value}{share}{ratio}")


if __name__ == "__main__":
    main()
