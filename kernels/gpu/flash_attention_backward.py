# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Launches and constants of the Triton language are outside its type hints.
"""FlashAttention's backward pass (Dao, https://arxiv.org/abs/2307.08691) in the Triton language.

Three kernels: δ = rowsum(output × its gradient); the gradients of keys and values, a block of keys walking the rows of
every query head that shares them, so that nothing is added atomically and sums have one order; the gradient of queries,
a block of rows walking the keys. Weights are recomputed from the forward pass's row statistics. For queries, as there,
only blocks at the diagonal, the window's edge and the ends carry masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.flash_attention import (
    LOG2_E,
    TILES_FP32,
    Tile,
    load_rows,
    precision_of,
    sequence,
    span,
    tiles_of,
    visible,
)
from penjing.kernels.gpu.registry import Variant

# Padded head size → tile on sm_90, for keys and values, and for queries.
TILES_KEY = {
    16: Tile(64, 128, 8, 2),
    32: Tile(64, 128, 8, 2),
    64: Tile(32, 64, 4, 3),
    128: Tile(32, 64, 4, 3),
    256: Tile(32, 64, 8, 2),
}
TILES_QUERY = {
    16: Tile(128, 64, 8, 2),
    32: Tile(128, 64, 8, 2),
    64: Tile(64, 64, 4, 2),
    128: Tile(128, 64, 8, 3),
    256: Tile(64, 32, 8, 2),
}
TILES_TF32 = dict.fromkeys(TILES_KEY, Tile(64, 32, 4, 2)) | {256: Tile(32, 32, 4, 1)}  # of both
DELTA_ROWS = 64


@triton.jit
def _delta(
    out_ptr, grad_ptr, delta_ptr, out_batch, out_row, out_head, grad_batch, grad_row, grad_head,
    delta_batch, delta_head, num_rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_M
    head, batch = tl.cast(tl.program_id(1), tl.int64), tl.cast(tl.program_id(2), tl.int64)
    out = load_rows(
        out_ptr + batch * out_batch + head * out_head, first, out_row, num_rows, HEAD_DIM, BLOCK_D, BLOCK_M, True
    )
    grad = load_rows(
        grad_ptr + batch * grad_batch + head * grad_head, first, grad_row, num_rows, HEAD_DIM, BLOCK_D, BLOCK_M, True
    )
    row_M, inside_M = span(first, num_rows, BLOCK_M)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    tl.store(delta_ptr + batch * delta_batch + head * delta_head + row_M, delta, mask=inside_M)


@triton.jit
def _gradient_key(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, cu_query, cu_key,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, grad_batch, grad_row, grad_head,
    gk_batch, gk_row, gk_head, lse_batch, lse_head, group, max_query, max_key, scale, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BLOCK_N  # the first keys are seen by most rows and start first
    kv_head = tl.cast(tl.program_id(1), tl.int64)
    batch, start_q, length_q, start_k, length_k = sequence(cu_query, cu_key, max_query, max_key, VARLEN)
    if first >= length_k:
        return
    q_ptr += batch * q_batch + start_q * tl.cast(q_row, tl.int64)
    grad_ptr += batch * grad_batch + start_q * tl.cast(grad_row, tl.int64)
    lse_ptr += batch * lse_batch + start_q
    delta_ptr += batch * lse_batch + start_q
    k_ptr += batch * k_batch + start_k * tl.cast(k_row, tl.int64) + kv_head * k_head
    v_ptr += batch * v_batch + start_k * tl.cast(v_row, tl.int64) + kv_head * v_head
    out_offset = batch * gk_batch + start_k * tl.cast(gk_row, tl.int64) + kv_head * gk_head

    shift = length_k - length_q
    key_N, inside_N = span(first, length_k, BLOCK_N)
    last = tl.minimum(first + BLOCK_N, length_k) - 1
    k = load_rows(k_ptr, first, k_row, length_k, HEAD_DIM, BLOCK_D, BLOCK_N, True)
    v = load_rows(v_ptr, first, v_row, length_k, HEAD_DIM, BLOCK_D, BLOCK_N, True)
    grad_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)

    begin, end = 0, length_q
    if CAUSAL:
        begin = tl.maximum(first - shift, 0) // BLOCK_M * BLOCK_M
    if WINDOWED:
        end = tl.maximum(tl.minimum(length_q, last - shift + window), 0)

    for member in range(group):
        head = kv_head * group + member
        q_base, grad_base = q_ptr + head * q_head, grad_ptr + head * grad_head
        lse_base, delta_base = lse_ptr + head * lse_head, delta_ptr + head * lse_head
        # One loop masks every block: with another one for the blocks that need none, registers spill (80 to 170 bytes).
        for row in range(begin, end, BLOCK_M):
            q = load_rows(q_base, row, q_row, length_q, HEAD_DIM, BLOCK_D, BLOCK_M, True)
            grad = load_rows(grad_base, row, grad_row, length_q, HEAD_DIM, BLOCK_D, BLOCK_M, True)
            row_M, inside_M = span(row, length_q, BLOCK_M)
            # Rows past the end have weight 0 by their statistics; keys past the end are not stored.
            lse = tl.load(lse_base + row_M, mask=inside_M, other=float("inf"))
            delta = tl.load(delta_base + row_M, mask=inside_M, other=0.0)
            weight = tl.exp2(
                tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2 - lse[None, :]
            )  # (keys, rows)
            if CAUSAL:
                weight = tl.where(key_N[:, None] <= (row_M + shift)[None, :], weight, 0.0)
            if WINDOWED:
                weight = tl.where(key_N[:, None] > (row_M + shift - window)[None, :], weight, 0.0)
            grad_v = tl.dot(weight.to(grad.dtype), grad, grad_v, input_precision=PRECISION)
            grad_weight = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
            grad_score = weight * (grad_weight - delta[None, :])
            grad_k = tl.dot(grad_score.to(q.dtype), q, grad_k, input_precision=PRECISION)

    column = tl.arange(0, BLOCK_D)
    offset = out_offset + tl.cast(key_N, tl.int64)[:, None] * gk_row + column[None, :]
    mask = inside_N[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(grad_k_ptr + offset, (grad_k * scale).to(grad_k_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_v_ptr + offset, grad_v.to(grad_v_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _walk_keys(
    grad_q, q, grad, lse, delta, k_base, v_base, stride_k, stride_v, begin, end,
    position_M, length_k, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for key in range(begin, end, BLOCK_N):
        k = load_rows(k_base, key, stride_k, length_k, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        v = load_rows(v_base, key, stride_v, length_k, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if MASKED:
            key_N = key + tl.arange(0, BLOCK_N)
            seen = visible(position_M[:, None], key_N[None, :], length_k, window, CAUSAL, WINDOWED)
            score = tl.where(seen, score, float("-inf"))
        weight = tl.exp2(score - lse[:, None])
        grad_weight = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        grad_score = weight * (grad_weight - delta[:, None])
        grad_q = tl.dot(grad_score.to(k.dtype), k, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit
def _gradient_query(
    q_ptr, k_ptr, v_ptr, grad_ptr, lse_ptr, delta_ptr, grad_q_ptr, cu_query, cu_key,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, grad_batch, grad_row, grad_head,
    gq_batch, gq_row, gq_head, lse_batch, lse_head, group, max_query, max_key, scale, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.cast(tl.program_id(1), tl.int64)
    batch, start_q, length_q, start_k, length_k = sequence(cu_query, cu_key, max_query, max_key, VARLEN)
    if first >= length_q:
        return
    kv_head = head // group
    q_ptr += batch * q_batch + start_q * tl.cast(q_row, tl.int64) + head * q_head
    grad_ptr += batch * grad_batch + start_q * tl.cast(grad_row, tl.int64) + head * grad_head
    k_ptr += batch * k_batch + start_k * tl.cast(k_row, tl.int64) + kv_head * k_head
    v_ptr += batch * v_batch + start_k * tl.cast(v_row, tl.int64) + kv_head * v_head
    grad_q_ptr += batch * gq_batch + start_q * tl.cast(gq_row, tl.int64) + head * gq_head
    row_M, inside_M = span(first, length_q, BLOCK_M)
    statistics = batch * lse_batch + head * lse_head + start_q + row_M
    lse = tl.load(lse_ptr + statistics, mask=inside_M, other=float("inf"))
    delta = tl.load(delta_ptr + statistics, mask=inside_M, other=0.0)
    q = load_rows(q_ptr, first, q_row, length_q, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    grad = load_rows(grad_ptr, first, grad_row, length_q, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    grad_q = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    shift = length_k - length_q
    position_M = row_M + shift
    lowest, highest = first + shift, tl.minimum(first + BLOCK_M, length_q) - 1 + shift
    begin, end = 0, length_k
    clear_begin, clear_end = 0, length_k // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, highest + 1), 0)
        clear_end = tl.maximum(tl.minimum(length_k, lowest + 1), 0) // BLOCK_N * BLOCK_N
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        clear_begin = tl.cdiv(tl.maximum(highest - window + 1, 0), BLOCK_N) * BLOCK_N
        clear_begin = tl.minimum(clear_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        grad_q = _walk_keys(
            grad_q, q, grad, lse, delta, k_ptr, v_ptr, k_row, v_row, begin, tl.minimum(clear_begin, end),
            position_M, length_k, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True, PRECISION,
        )  # fmt: skip
    grad_q = _walk_keys(
        grad_q, q, grad, lse, delta, k_ptr, v_ptr, k_row, v_row, clear_begin, clear_end,
        position_M, length_k, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, False, PRECISION,
    )  # fmt: skip
    grad_q = _walk_keys(
        grad_q, q, grad, lse, delta, k_ptr, v_ptr, k_row, v_row, tl.maximum(clear_begin, clear_end), end,
        position_M, length_k, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True, PRECISION,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    pointers = grad_q_ptr + tl.cast(row_M, tl.int64)[:, None] * gq_row + column[None, :]
    mask = inside_M[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(pointers, (grad_q * scale).to(grad_q_ptr.dtype.element_ty), mask=mask)


def flash_attention_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_query: torch.Tensor | None,
    cu_key: torch.Tensor | None,
    max_query: int,
    max_key: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, from what `flash_attention_forward` took and returned."""
    num_heads, num_kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    num_sequences = q.shape[0] if cu_query is None else cu_query.shape[0] - 1
    grad_out = grad_out if grad_out.stride(3) == 1 else grad_out.contiguous()
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    if q.numel() == 0 or k.numel() == 0:
        return grad_q.zero_(), grad_k.zero_(), grad_v.zero_()
    block_d = max(triton.next_power_of_2(head_dim), 16)
    delta = torch.empty_like(lse)
    _delta[(triton.cdiv(q.shape[1], DELTA_ROWS), num_heads, q.shape[0])](
        out, grad_out, delta, *out.stride()[:3], *grad_out.stride()[:3], *delta.stride()[:2], q.shape[1],
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=DELTA_ROWS,
    )  # fmt: skip
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad_out.stride()[:3])
    numbers = (*lse.stride()[:2], num_heads // num_kv_heads, max_query, max_key, scale, scale * LOG2_E, window)
    modes: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "CAUSAL": causal, "WINDOWED": window > 0}
    modes["VARLEN"] = cu_query is not None
    modes["PRECISION"] = precision_of(q.dtype)
    tile = tiles_of(q.dtype, TILES_KEY, TILES_TF32)[block_d]
    _gradient_key[(triton.cdiv(max_key, tile.key), num_kv_heads, num_sequences)](
        q, k, v, grad_out, lse, delta, grad_k, grad_v, cu_query, cu_key, *strides, *grad_k.stride()[:3], *numbers,
        BLOCK_M=tile.query, BLOCK_N=tile.key, **modes, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = tiles_of(q.dtype, TILES_QUERY, TILES_TF32)[block_d]
    _gradient_query[(triton.cdiv(max_query, tile.query), num_heads, num_sequences)](
        q, k, v, grad_out, lse, delta, grad_q, cu_query, cu_key, *strides, *grad_q.stride()[:3], *numbers,
        BLOCK_M=tile.query, BLOCK_N=tile.key, **modes, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return grad_q, grad_k, grad_v


def variants() -> Iterator[Variant]:
    """The forward pass's cases, for the three kernels."""
    cases = [(head_dim, "bf16", False) for head_dim in (64, 96, 128, 192, 256)]
    for head_dim, dtype, packed_window in [*cases, (128, "bf16", True), (128, "fp16", False), (64, "fp32", False)]:
        block_d, exact = triton.next_power_of_2(head_dim), dtype == "fp32"
        full = head_dim not in (64, 128) or dtype != "bf16"
        label = f"hd{head_dim} {dtype} causal{' window packed' * packed_window}"
        half = ("q", "k", "v", "grad")
        sides = (("gk", _gradient_key, TILES_KEY), ("gq", _gradient_query, TILES_QUERY))
        outputs = {"gk": ("grad_k_ptr", "grad_v_ptr"), "gq": ("grad_q_ptr",)}
        for side, kernel, tiles in sides:
            tile = (TILES_FP32 if exact else tiles)[block_d]
            strides = [f"{name}_{part}" for name in (*half, side) for part in ("batch", "row", "head")]
            lengths = dict.fromkeys(("cu_query", "cu_key"), "*i32:16")
            yield Variant(
                label=f"{'dK dV' if side == 'gk' else 'dQ'} {label}",
                kernel=kernel,
                arguments=dict.fromkeys([*(f"{name}_ptr" for name in half), *outputs[side]], f"*{dtype}:16")
                | dict.fromkeys(("lse_ptr", "delta_ptr"), "*fp32:16")
                | (lengths if packed_window else {})
                | dict.fromkeys(strides, "i32:16")
                | dict.fromkeys(("lse_batch", "lse_head", "group", "max_query", "max_key", "window"), "i32")
                | {"scale": "fp32", "scale_log2": "fp32"},
                constants={
                    "HEAD_DIM": head_dim,
                    "BLOCK_D": block_d,
                    "BLOCK_M": tile.query,
                    "BLOCK_N": tile.key,
                    "CAUSAL": True,
                    "WINDOWED": packed_window,
                    "VARLEN": packed_window,
                    "PRECISION": "ieee",
                }
                | ({} if packed_window else dict.fromkeys(lengths)),
                num_warps=tile.warps,
                num_stages=tile.stages,
                # dK and dV of 128 dimensions spill 144 bytes: 7 % faster on an H100 than a tile that does not.
                hot=not exact and (not packed_window if side == "gq" else head_dim <= 64),
                full=full,
            )
        if not packed_window:
            strides = [f"{name}_{part}" for name in ("out", "grad") for part in ("batch", "row", "head")]
            yield Variant(
                label=f"delta {label}",
                kernel=_delta,
                arguments=dict.fromkeys(("out_ptr", "grad_ptr"), f"*{dtype}:16")
                | {"delta_ptr": "*fp32:16"}
                | dict.fromkeys(strides, "i32:16")
                | dict.fromkeys(("delta_batch", "delta_head", "num_rows"), "i32"),
                constants={"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_M": DELTA_ROWS},
                full=full,
            )
