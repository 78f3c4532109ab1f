# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Launches and constants of the Triton language are outside its type hints.
"""What paged attention does with a segment of keys, for decode and prefill alike: sums of values, and their joining.

Scores lie as (keys, rows) and sums as (values, rows), so that a row's bits do not depend on how many stand beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def join(acc, peak, total, part, part_peak, part_total):
    """The sum of two softmaxes (D, rows) with their peaks (log2); one without keys has peak −∞ and changes no bit."""
    new_peak = tl.maximum(peak, part_peak)
    reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    keep, take = tl.exp2(peak - reference), tl.exp2(part_peak - reference)
    return acc * keep[None, :] + part * take[None, :], new_peak, total * keep + part_total * take


@triton.jit
def widened(words, q, FAST: tl.constexpr):
    """(N, D / 4) int32 of four INT8 codes each → (N, D) in the type of `q`.

    FAST: in four instructions for two codes, of sm_90. 0x43 before a byte b is 128 + b in bfloat16 or, with the byte's
    sign bit on, what lies 256 above the code; the interpreter knows no such instructions.
    """
    if FAST:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 x, y, s, t;
            prmt.b32 x, $4, 0x43434343, 0x5140;
            and.b32 s, x, 0xff80ff80;
            and.b32 t, x, 0xff7fff7f;
            sub.bf16x2 x, t, s;
            prmt.b32 y, $4, 0x43434343, 0x7362;
            and.b32 s, y, 0xff80ff80;
            and.b32 t, y, 0xff7fff7f;
            sub.bf16x2 y, t, s;
            mov.b32 {$0, $1}, x;
            mov.b32 {$2, $3}, y;
            }""",
            "=h,=h,=h,=h,r", [words], dtype=(q.dtype, q.dtype, q.dtype, q.dtype), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b = ((words << 24) >> 24).to(q.dtype), ((words << 16) >> 24).to(q.dtype)
        c, d = ((words << 8) >> 24).to(q.dtype), (words >> 24).to(q.dtype)
    return tl.join(tl.join(a, c), tl.join(b, d)).reshape(words.shape[0], 4 * words.shape[1])


@triton.jit
def segment_sums(
    q, position_M, lowest, highest, begin, end, table, selected, k_cache, v_cache, k_scale, v_scale, kv_head, kv_heads,
    num_blocks, scale_log2, window, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr, INT8: tl.constexpr, FAST: tl.constexpr,
    LISTED: tl.constexpr,
):  # fmt: skip
    """(Weighted values (D, rows), peaks, sums of weights) of the keys begin … end − 1; the other keys are not read.

    LISTED: begin … end − 1 count the keys of the blocks `selected`, of which those before a row's window are seen.
    """
    acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)  # of each key's lane: they meet after the loop
    column = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        key_N = first + tl.arange(0, BLOCK_N)
        wanted = key_N < end
        if LISTED:
            block = tl.load(selected + key_N // PAGE, mask=wanted, other=-1)
            key_N = block * PAGE + key_N % PAGE
            wanted = wanted & (block >= 0) & (block <= highest // PAGE) & (key_N <= highest - window)
        else:
            wanted = wanted & (key_N <= highest)
            if WINDOWED:
                wanted = wanted & (key_N > lowest - window)
        page = tl.load(table + key_N // PAGE, mask=wanted, other=0)
        inside = (page >= 0) & (page < num_blocks)
        # int64 before the product: a pool passes 2³¹ values.
        row = (tl.cast(page, tl.int64) * kv_heads + kv_head) * PAGE + key_N % PAGE
        mask = (wanted & inside)[:, None] & (column < HEAD_DIM)[None, :]
        if INT8:
            word = tl.arange(0, BLOCK_D // 4)
            words = row[:, None] * (HEAD_DIM // 4) + word[None, :]
            mask_words = (wanted & inside)[:, None] & (word < HEAD_DIM // 4)[None, :]
            k = widened(tl.load(k_cache + words, mask=mask_words, other=0), q, FAST)
        else:
            k = tl.load(k_cache + row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0)
        score = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
        if INT8:
            score = score * tl.load(k_scale + row, mask=wanted & inside, other=0.0)[:, None]
        if LISTED:
            seen = wanted[:, None] & (key_N[:, None] <= position_M[None, :] - window)
        else:
            seen = wanted[:, None] & (key_N[:, None] <= position_M[None, :])
            if WINDOWED:
                seen = seen & (key_N[:, None] > position_M[None, :] - window)
        score = tl.where(seen, score, float("-inf"))
        # A block id outside the cache cannot raise here: the row becomes NaN, which the sampler reports.
        score = tl.where(seen & (inside == 0)[:, None], float("nan"), score)
        new_peak = tl.maximum(peak, tl.max(score, 0))
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - reference[None, :])
        decay = tl.exp2(peak - reference)
        total = total * decay[None, :] + weight
        if INT8:
            v = widened(tl.load(v_cache + words, mask=mask_words, other=0), q, FAST)
            weight = weight * tl.load(v_scale + row, mask=wanted & inside, other=0.0)[:, None]
        else:
            v = tl.load(v_cache + row[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0)
        acc = tl.dot(tl.trans(v), weight.to(q.dtype), acc * decay[None, :], input_precision="ieee")
        peak = new_peak
    return acc, peak, tl.sum(total, 0)
