"""Measure the Triton-language kernels other than attention on a CUDA device: a part of run_kernels_gpu.py.

Each is timed in turn with torch's way and with the ceilings: a copy of 1 GiB and a bf16 product of 8192³ (INT8: twice
that). Data are random, medians are taken, operands are larger than the L2 cache. Without a CUDA device the rows say so.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lib.head_start import HeadStart
from lib.rows import Row, new_row
from penjing.kernels.block_sparse_attention import block_sparse_attention
from penjing.kernels.cross_entropy import linear_cross_entropy
from penjing.kernels.dispatch import cuda_refusal, force_torch
from penjing.kernels.int4_linear import prepack_int4, quantize_for_int4, scaled_int4_matmul
from penjing.kernels.int8_linear import int8_matmul, int8_weight_linear, prepack_int8, scaled_int8_matmul
from penjing.kernels.moe import experts_mlp
from penjing.kernels.quantize import quantize_per_token
from penjing.kernels.quantize_gradient import dequantize_gradient, quantize_gradient
from penjing.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantize
from penjing.kernels.rotary import apply_rotary, rotary_cos_sin, rotary_write_kv
from penjing.kernels.swiglu import swiglu, swiglu_quantize

Run = Callable[[], object]
COPY, PRODUCT, INT8_PRODUCT = "copy", "bf16 product", "INT8 product"
UNITS = {COPY: "GB/s", PRODUCT: "TFLOP/s", INT8_PRODUCT: "TOPS"}
TORCH = f"torch {torch.__version__.partition('+')[0]}"


@dataclass
class Case:
    """`run` does `work` (bytes or operations) against the ceiling `limit`; `peer` is torch's way to the same."""

    name: str
    work: float
    limit: str
    run: Run
    peer: Run | None = None


def cases(device: str, small: bool = False) -> Iterator[Case]:
    """All cases, one after the other, so that only one holds memory; `small` shapes to try them."""
    for group in (
        rows_cases,
        rotary_cases,
        int8_cases,
        int4_cases,
        loss_cases,
        moe_cases,
        sparse_cases,
        gradient_cases,
    ):
        yield from group(device, small)


def draw(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def on_torch(run: Run) -> Run:
    """The same function on torch's operations."""

    def without_kernels() -> object:
        with force_torch():
            return run()

    return without_kernels


def gradient_of(function: Callable[..., Tensor], *inputs: Tensor) -> Run:
    """Only the backward pass of `function`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True)


def rows_cases(device: str, small: bool) -> Iterator[Case]:
    m, k = (8, 64) if small else (16384, 4096)
    x, residual, weight = draw(m, k, device=device), draw(m, k, device=device), draw(k, device=device)
    gate, up = draw(m, k, device=device), draw(m, k, device=device)
    each = float(m * k)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (k,), weight, 1e-6)

    def add_norm() -> object:
        total = x + residual
        return norm(total, weight), total

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6)

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def quantize() -> object:
        return quantize_per_token(x)

    yield Case("quantize", 3 * each, COPY, quantize, on_torch(quantize))
    yield Case("rms_norm", 4 * each, COPY, lambda: ours(x, weight), lambda: norm(x, weight))
    yield Case("add_rms_norm", 8 * each, COPY, lambda: add_rms_norm(x, residual, weight, 1e-6), add_norm)
    fused = lambda: rms_norm_quantize(x, weight, 1e-6)  # noqa: E731
    yield Case("rms_norm_quantize", 3 * each, COPY, fused, on_torch(fused))
    yield Case("rms_norm_backward", 6 * each, COPY, gradient_of(ours, x, weight), gradient_of(norm, x, weight))
    yield Case("swiglu", 6 * each, COPY, lambda: swiglu(gate, up), lambda: gated(gate, up))
    yield Case("swiglu_backward", 10 * each, COPY, gradient_of(swiglu, gate, up), gradient_of(gated, gate, up))
    both = lambda: swiglu_quantize(gate, up)  # noqa: E731
    yield Case("swiglu_quantize", 5 * each, COPY, both, on_torch(both))


def rotary_cases(device: str, small: bool) -> Iterator[Case]:
    tokens, heads, kv_heads, head_dim, block_size = (5, 4, 2, 64, 16) if small else (32768, 32, 8, 128, 64)
    q = draw(tokens, heads, head_dim, device=device)
    k, v = draw(tokens, kv_heads, head_dim, device=device), draw(tokens, kv_heads, head_dim, device=device)
    frequency = 10000.0 ** (-torch.arange(head_dim // 2, device=device) / (head_dim // 2))
    cos, sin = rotary_cos_sin(frequency, torch.arange(tokens, device=device))
    blocks = -(-tokens // block_size)
    pages = [torch.zeros(blocks, kv_heads, block_size, head_dim, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.zeros(blocks, kv_heads, block_size, device=device) for _ in range(2)]
    slots = torch.randperm(tokens, device=device)
    rotate = lambda: apply_rotary(q, cos, sin)  # noqa: E731
    angles = 4.0 * cos.numel() * 2
    yield Case("rotary", 4.0 * q.numel() + angles, COPY, rotate, on_torch(rotate))
    step = lambda: rotary_write_kv(q, k, v, cos, sin, pages[0], pages[1], slots, scales[0], scales[1])  # noqa: E731
    yield Case("rotary_write_kv_int8", 4.0 * q.numel() + 6.0 * k.numel() + angles, COPY, step, on_torch(step))


def int8_cases(device: str, small: bool) -> Iterator[Case]:
    int_mm = torch.ops.aten._int_mm.default
    for label in (4096, 8192):
        size = 32 if small else label
        a, b = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        work = 2.0 * size**3
        sums, plain_sums = lambda a=a, b=b: int8_matmul(a, b), lambda a=a, b=b: int_mm(a, b.t())
        yield Case(f"int8_matmul_{label}", work, INT8_PRODUCT, sums, plain_sums)
        packed, scale = prepack_int8(b, torch.rand(size, device=device)), torch.rand(size, device=device)
        run = lambda a=a, s=scale, p=packed: scaled_int8_matmul(a, s, p, dtype=torch.bfloat16)  # noqa: E731
        yield Case(f"int8_matmul_{label}_scaled_bf16", work, INT8_PRODUCT, run, on_torch(run))
        run = lambda a=a, s=scale, p=packed: scaled_int8_matmul(a, s, p, dtype=torch.bfloat16, swiglu=True)  # noqa: E731
        yield Case(f"int8_matmul_{label}_swiglu_bf16", work, INT8_PRODUCT, run, on_torch(run))
    n, k = (64, 32) if small else (28672, 8192)
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device)
    packed, wide = prepack_int8(weight, torch.rand(n, device=device)), draw(n, k, device=device)
    for rows in (1, 16, 64):
        q, scale = quantize_per_token(draw(rows, k, device=device))
        x = draw(rows, k, device=device)
        plain = lambda x=x: F.linear(x, wide)  # noqa: E731
        run = lambda q=q, s=scale: scaled_int8_matmul(q, s, packed, dtype=torch.bfloat16)  # noqa: E731
        yield Case(f"int8_matmul_{rows}_rows", float(n * k), COPY, run, plain)
        if rows <= 16:
            run = lambda x=x: int8_weight_linear(x, packed)  # noqa: E731
            yield Case(f"int8_weight_linear_{rows}_rows", float(n * k), COPY, run, plain)


def int4_cases(device: str, small: bool) -> Iterator[Case]:
    """Beside bfloat16 products of the same shape; few rows read half a byte a weight and the groups' scales."""
    n, k = (64, 64) if small else (28672, 8192)
    packed_NK8 = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device=device)
    wide = draw(n, k, device=device)
    for group, offsets in ((64, False), (32, True)):
        scale = torch.rand(n, k // group, device=device, dtype=torch.float16) * 0.01
        packed = prepack_int4(packed_NK8, scale, None, -8 * scale if offsets else None)
        label = f"groups of {group}{' with offsets' if offsets else ''}"
        num_bytes = n * k / 2 + (2 if offsets else 1) * 2 * scale.numel()
        for rows in (1, 16, 64, 4096):
            x = draw(2 if small else rows, k, device=device)
            q, s = quantize_for_int4(x, packed)
            run = lambda q=q, s=s, p=packed: scaled_int4_matmul(q, s, p, dtype=torch.bfloat16)  # noqa: E731
            plain = lambda x=x: F.linear(x, wide)  # noqa: E731
            work, limit = (2.0 * rows * n * k, INT8_PRODUCT) if rows > 64 else (num_bytes, COPY)
            yield Case(f"int4_matmul_{rows}_rows, {label}", work, limit, run, plain)


def loss_cases(device: str, small: bool) -> Iterator[Case]:
    tokens, hidden, vocabulary = (9, 16, 40) if small else (8192, 4096, 128256)
    x = draw(tokens, hidden, device=device).requires_grad_()
    weight = (draw(vocabulary, hidden, device=device) / hidden**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)

    def fused() -> object:
        return torch.autograd.grad(linear_cross_entropy(x, weight, targets), (x, weight))

    def usual() -> object:
        loss = F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")
        return torch.autograd.grad(loss, (x, weight))

    yield Case("linear_cross_entropy_both_passes", 6.0 * tokens * hidden * vocabulary, PRODUCT, fused, usual)


def moe_cases(device: str, small: bool) -> Iterator[Case]:
    tokens, hidden, inner, experts, chosen = (9, 16, 24, 4, 2) if small else (8192, 2048, 1024, 64, 8)
    shapes = [(inner, hidden)] * 2 + [(hidden, inner)]
    gates, ups, downs = ([draw(*s, device=device) / s[1] ** 0.5 for _ in range(experts)] for s in shapes)
    x = draw(tokens, hidden, device=device)
    weight, expert = torch.rand(tokens, experts, device=device).topk(chosen)

    def forward(x: Tensor, *weights: Tensor) -> Tensor:
        return experts_mlp(x, weight, expert, weights[:experts], weights[experts:-experts], weights[-experts:])

    def backward() -> Run:
        return gradient_of(forward, x, *gates, *ups, *downs)

    run = lambda: forward(x, *gates, *ups, *downs)  # noqa: E731
    work = 6.0 * tokens * chosen * hidden * inner
    yield Case("moe_forward", work, PRODUCT, run, on_torch(run))
    with force_torch():
        peer = backward()
    yield Case("moe_backward", 2 * work, PRODUCT, backward(), peer)


def sparse_cases(device: str, small: bool) -> Iterator[Case]:
    tokens, heads, kv_heads, head_dim, size, entries = (64, 4, 2, 16, 16, 2) if small else (32768, 32, 8, 128, 64, 16)
    q = draw(1, heads, tokens, head_dim, device=device)
    k, v = (draw(1, kv_heads, tokens, head_dim, device=device) for _ in range(2))
    blocks = tokens // size
    # The newest blocks and, for the rest of the list, random older ones.
    score = torch.rand(1, kv_heads, blocks, blocks, device=device)
    index = torch.arange(blocks, device=device)
    score = score.masked_fill(index[None, :] > index[:, None], -1.0).masked_fill(index[:, None] == index[None, :], 2.0)
    best = score.topk(entries)
    lists = torch.where(best.values < 0, -1, best.indices).to(torch.int32)

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, lists, block_size=size)

    def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    # torch's fast kernels take as many key heads as queries.
    every = q, *(x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    work = 4.0 * heads * head_dim * size**2 * float((lists >= 0).sum()) / kv_heads
    yield Case("block_sparse_attention_forward", work, PRODUCT, lambda: sparse(q, k, v), lambda: full(*every))
    backward = gradient_of(sparse, q, k, v), gradient_of(full, *every)
    yield Case("block_sparse_attention_backward", 2.5 * work, PRODUCT, *backward)


def gradient_cases(device: str, small: bool) -> Iterator[Case]:
    count = 5000 if small else 1 << 28
    gradient = draw(count, device=device, dtype=torch.float32)
    pack = lambda: quantize_gradient(gradient, 1)  # noqa: E731
    yield Case("quantize_gradient", 5.0 * count, COPY, pack)
    packed = torch.stack([quantize_gradient(gradient, seed) for seed in range(4)])
    yield Case("dequantize_gradient_of_4", 8.0 * count, COPY, lambda: dequantize_gradient(packed, count))


def ceilings() -> dict[str, tuple[float, Run]]:
    """Limit → (work of a run, run)."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_(0, 256) for _ in range(2))
    a, b = draw(8192, 8192, device="cuda"), draw(8192, 8192, device="cuda")
    return {COPY: (2.0 * source.numel(), lambda: target.copy_(source)), PRODUCT: (2.0 * 8192**3, lambda: a @ b)}


def measure(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Median seconds of each, in turn, on the device's own clock."""
    for run in runs.values():
        for _ in range(3):
            run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    lead = HeadStart()
    for _ in range(rounds):
        for name, run in runs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            lead.give()
            begin.record()
            run()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def measured_rows(rounds: int, budget: float) -> list[Row]:
    """A row of each case: its rate, the share of its ceiling, and the ratio to torch in the same run."""
    limits, found = ceilings(), []
    began = time.perf_counter()
    for case in cases("cuda"):
        if time.perf_counter() - began > budget:
            why = f"the budget of {budget:.0f} s was spent"
            found.append(new_row("kernels_gpu", case.name, None, UNITS[case.limit], runs=0, reason=why))
            continue
        ceiling_work, ceiling_run = limits[COPY if case.limit == COPY else PRODUCT]
        runs = {"kernel": case.run, "ceiling": ceiling_run} | ({"peer": case.peer} if case.peer else {})
        seconds = measure(runs, rounds)
        factor = 1e9 if case.limit == COPY else 1e12
        ceiling = ceiling_work / seconds["ceiling"] * (2.0 if case.limit == INT8_PRODUCT else 1.0)
        rate = case.work / seconds["kernel"]
        row = new_row(
            "kernels_gpu",
            case.name,
            rate / factor,
            UNITS[case.limit],
            runs=rounds,
            baseline=TORCH if case.peer else None,
            baseline_value=case.work / seconds["peer"] / factor if case.peer else None,
            share_of_limit=rate / ceiling,
            device=torch.cuda.get_device_name(),
        )
        found.append(row)
        torch.cuda.empty_cache()
    return found


def op_rows(rounds: int = 11, seconds: float = math.inf) -> list[Row]:
    """The rows of all cases; without a device that runs the kernels, or after `seconds`, with the reason alone."""
    reason = cuda_refusal()
    if reason is None:
        return measured_rows(rounds, seconds)
    return [
        new_row("kernels_gpu", case.name, None, UNITS[case.limit], runs=0, reason=reason)
        for case in cases("cpu", small=True)
    ]
