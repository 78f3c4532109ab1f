# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Launches and constants of the Triton language are outside its type hints.
"""FlashAttention's forward pass (Dao, https://arxiv.org/abs/2307.08691) in the Triton language.

A block of query rows walks the keys with an online softmax in base 2 (log2 e is folded into the scale). Key blocks that
every row sees whole carry no mask: only those at the diagonal, at the window's edge and at the end do. The row
statistics kept for the backward pass are log2 of the softmax's denominator; +∞ for a row that sees no key, so that its
weights come out as 0. Head sizes that are no power of two are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """Rows of queries and keys a block handles at once, and how it is launched."""

    query: int
    key: int
    warps: int
    stages: int


# Padded head size → tile on sm_90. Half precision; keys, values and queries fit in 227 KiB.
TILES = {
    16: Tile(128, 64, 4, 2),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(128, 128, 8, 3),
    256: Tile(128, 32, 8, 3),
}
# Fewer rows of a small tile lie beyond a window's edge: at 1024 keys 379 TFLOP/s of an H100 instead of 330.
TILES_WINDOW = TILES | dict.fromkeys((64, 128), Tile(64, 64, 4, 3))
TILES_FP32 = dict.fromkeys(TILES, Tile(32, 32, 4, 1))  # without tensor cores, which would round to TF32
TILES_TF32 = dict.fromkeys(TILES, Tile(128, 64, 8, 2)) | {256: Tile(32, 32, 4, 2)}


@triton.jit
def span(position, LENGTH, BLOCK: tl.constexpr):
    """Rows position … position + BLOCK − 1 as (int32 indices, mask of those below LENGTH)."""
    index = position + tl.arange(0, BLOCK)
    return index, index < LENGTH


@triton.jit
def load_rows(
    base, row, stride, LENGTH, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """Tile (BLOCK, BLOCK_D) of the rows `row` …, zeros past LENGTH (if MASKED) and past HEAD_DIM."""
    index = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_D)
    # The first row is int64: a row times its stride can pass 2³¹; within a block it cannot.
    pointers = (base + tl.cast(row, tl.int64) * stride) + (index[:, None] * stride + column[None, :])
    if MASKED:
        return tl.load(pointers, mask=((row + index) < LENGTH)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    if HEAD_DIM < BLOCK_D:
        return tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def sequence(cu_query, cu_key, max_query, max_key, VARLEN: tl.constexpr):
    """(batch row, first query, queries, first key, keys) of this block's sequence; packed ones share batch row 0."""
    index = tl.program_id(2)
    batch = tl.cast(index, tl.int64)
    start_q, start_k, length_q, length_k = 0, 0, max_query, max_key
    if VARLEN:
        batch = tl.cast(0, tl.int64)
        start_q, start_k = tl.load(cu_query + index), tl.load(cu_key + index)
        length_q, length_k = tl.load(cu_query + index + 1) - start_q, tl.load(cu_key + index + 1) - start_k
    return batch, start_q, length_q, start_k, length_k


@triton.jit
def visible(position, key, LENGTH_K, WINDOW, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """Whether rows at absolute `position` see `key`; either (M, 1) and (1, N) or (1, M) and (N, 1)."""
    seen = key < LENGTH_K
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOWED:
        seen = seen & (key > position - WINDOW)
    return seen


@triton.jit
def _walk(
    acc, peak, total, q, k_base, v_base, stride_k, stride_v, begin, end, position_M, length_k, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    for key in range(begin, end, BLOCK_N):
        k = load_rows(k_base, key, stride_k, length_k, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if MASKED:
            key_N = key + tl.arange(0, BLOCK_N)
            seen = visible(position_M[:, None], key_N[None, :], length_k, window, CAUSAL, WINDOWED)
            score = tl.where(seen, score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1) * scale_log2)
            # A row that has seen no key keeps peak −∞; 0 in its place gives weights of 0 rather than NaN.
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        else:
            new_peak = tl.maximum(peak, tl.max(score, 1) * scale_log2)
            reference = new_peak
        weight = tl.exp2(score * scale_log2 - reference[:, None])
        decay = tl.exp2(peak - reference)
        total = total * decay + tl.sum(weight, 1)
        v = load_rows(v_base, key, stride_v, length_k, HEAD_DIM, BLOCK_D, BLOCK_N, MASKED)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return acc, peak, total


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_query, cu_key,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    lse_batch, lse_head, group, max_query, max_key, scale_log2, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, VARLEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last query blocks see most keys: they start first, so that the short ones fill the gaps at the end.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.cast(tl.program_id(1), tl.int64)
    kv_head = head // group
    batch, start_q, length_q, start_k, length_k = sequence(cu_query, cu_key, max_query, max_key, VARLEN)
    if first >= length_q:
        return
    q_ptr += batch * q_batch + start_q * tl.cast(q_row, tl.int64) + head * q_head
    k_ptr += batch * k_batch + start_k * tl.cast(k_row, tl.int64) + kv_head * k_head
    v_ptr += batch * v_batch + start_k * tl.cast(v_row, tl.int64) + kv_head * v_head
    out_ptr += batch * out_batch + start_q * tl.cast(out_row, tl.int64) + head * out_head
    lse_ptr += batch * lse_batch + head * lse_head + start_q

    row_M, inside_M = span(first, length_q, BLOCK_M)
    shift = length_k - length_q  # the last query is at the last key's position
    position_M = row_M + shift
    lowest, highest = first + shift, tl.minimum(first + BLOCK_M, length_q) - 1 + shift
    q = load_rows(q_ptr, first, q_row, length_q, HEAD_DIM, BLOCK_D, BLOCK_M, True)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)

    begin, end = 0, length_k
    clear_begin, clear_end = 0, length_k // BLOCK_N * BLOCK_N  # blocks that every row sees whole
    if CAUSAL:
        end = tl.maximum(tl.minimum(end, highest + 1), 0)
        clear_end = tl.maximum(tl.minimum(length_k, lowest + 1), 0) // BLOCK_N * BLOCK_N
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
        clear_begin = tl.cdiv(tl.maximum(highest - window + 1, 0), BLOCK_N) * BLOCK_N
        clear_begin = tl.minimum(clear_begin, tl.cdiv(end, BLOCK_N) * BLOCK_N)
        acc, peak, total = _walk(
            acc, peak, total, q, k_ptr, v_ptr, k_row, v_row, begin, tl.minimum(clear_begin, end),
            position_M, length_k, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True, PRECISION,
        )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, q, k_ptr, v_ptr, k_row, v_row, clear_begin, clear_end,
        position_M, length_k, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, False, PRECISION,
    )  # fmt: skip
    acc, peak, total = _walk(
        acc, peak, total, q, k_ptr, v_ptr, k_row, v_row, tl.maximum(clear_begin, clear_end), end,
        position_M, length_k, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_N, CAUSAL, WINDOWED, True, PRECISION,
    )  # fmt: skip

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse_ptr + row_M, lse, mask=inside_M)
    column = tl.arange(0, BLOCK_D)
    pointers = out_ptr + tl.cast(row_M, tl.int64)[:, None] * out_row + column[None, :]
    mask = inside_M[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(pointers, acc.to(out_ptr.dtype.element_ty), mask=mask)


def precision_of(dtype: torch.dtype) -> str:
    """ "tf32" where torch's own products of float32 take it; half types have one way of being multiplied."""
    shortened = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if shortened else "ieee"


def tiles_of(dtype: torch.dtype, half: dict[int, Tile], shortened: dict[int, Tile]) -> dict[int, Tile]:
    """The tiles of a type, of which `half` are those of half types and `shortened` of products in TF32."""
    if dtype != torch.float32:
        return half
    return TILES_FP32 if precision_of(dtype) == "ieee" else shortened


def flash_attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_query: torch.Tensor | None,
    cu_key: torch.Tensor | None,
    max_query: int,
    max_key: int,
    causal: bool,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked tensors of `kernels.flash_attention` → (output, row statistics (B, H, T) float32)."""
    num_heads, head_dim = q.shape[2], q.shape[3]
    num_sequences = q.shape[0] if cu_query is None else cu_query.shape[0] - 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[0], num_heads, q.shape[1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tile = tiles_of(q.dtype, TILES_WINDOW if window > 0 else TILES, TILES_TF32)[block_d]
    _forward[(triton.cdiv(max_query, tile.query), num_heads, num_sequences)](
        q, k, v, out, lse, cu_query, cu_key,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], *lse.stride()[:2],
        num_heads // k.shape[2], max_query, max_key, scale * LOG2_E, window,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=tile.query, BLOCK_N=tile.key,
        CAUSAL=causal, WINDOWED=window > 0, VARLEN=cu_query is not None, PRECISION=precision_of(q.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def variants() -> Iterator[Variant]:
    """Head sizes 64 … 256 in bf16 causal; fp16, fp32, windows and packed sequences at their commonest sizes."""
    cases = [(head_dim, "bf16", True, False, False) for head_dim in (64, 96, 128, 192, 256)]
    cases += [(128, "fp16", True, False, False), (128, "bf16", True, True, True), (64, "fp32", True, False, False)]
    quick = {(64, "bf16", True, False, False), (128, "bf16", True, False, False), (128, "bf16", True, True, True)}
    for case in cases:
        head_dim, dtype, causal, windowed, varlen = case
        block_d = triton.next_power_of_2(head_dim)
        tile = (TILES_FP32 if dtype == "fp32" else TILES_WINDOW if windowed else TILES)[block_d]
        integers = [f"{name}_{part}" for name in ("q", "k", "v", "out") for part in ("batch", "row", "head")]
        pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}:16")
        lengths = dict.fromkeys(("cu_query", "cu_key"), "*i32:16")
        yield Variant(
            label=f"hd{head_dim} {dtype}{' causal' * causal}{' window' * windowed}{' packed' * varlen}",
            kernel=_forward,
            arguments=pointers
            | (lengths if varlen else {})
            | dict.fromkeys(integers, "i32:16")
            | {"lse_ptr": "*fp32:16", "scale_log2": "fp32"}
            | dict.fromkeys(("lse_batch", "lse_head", "group", "max_query", "max_key", "window"), "i32"),
            constants={
                "HEAD_DIM": head_dim,
                "BLOCK_D": block_d,
                "BLOCK_M": tile.query,
                "BLOCK_N": tile.key,
                "CAUSAL": causal,
                "WINDOWED": windowed,
                "VARLEN": varlen,
                "PRECISION": "ieee",
            }
            | ({} if varlen else dict.fromkeys(lengths)),
            num_warps=tile.warps,
            num_stages=tile.stages,
            hot=dtype != "fp32",
            full=case not in quick,
        )
