# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Launches and constants of the Triton language are outside its type hints.
"""Paged attention in the Triton language: one kernel for decode and chunked prefill, and one that joins split keys.

A block takes BLOCK_M rows (query positions × heads of a group) of one sequence, found by binary search, and walks the
keys through the block table. Keys are cut into segments at fixed absolute positions: a segment is attended on its own
(online softmax, base 2) and then joined with the sum of those before it. A call of single tokens gives each segment to
a block of its own and joins them in a second kernel, by the same arithmetic in the same order, so that a row's result
depends on its own sequence alone. INT8 keys are multiplied as they are: their scales go to the scores and the weights.
With selected blocks of keys beside a window, the list is cut into segments too, which come after those of the window.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.flash_attention import LOG2_E
from penjing.kernels.gpu.paged_segment import join, segment_sums
from penjing.kernels.gpu.registry import MAX_HEAD_DIM, Variant

# Scores lie as (keys, rows): the 64 keys fill a warp group's product, and how many rows stand beside them changes no
# bit of a row. Decode takes few rows, since one token has no more than a group's heads; prefill takes many. On an H100
# this reads 90 % of the bandwidth in decode where 64 rows for both, as (rows, keys), read 56 with the host's launches
# counted; prefill, which spills, reaches 151 TFLOP/s where that reached 187.
BLOCK_N = 64
PREFILL_ROWS, DECODE_ROWS = 64, 16
WARPS = 4
PREFILL_STAGES, DECODE_STAGES = 2, 3
LEAST_SEGMENT = 128
SEGMENT_KEYS = 512  # of the deterministic mode, whatever the batch
CODES_A_WORD = 4  # INT8 keys and values are read as words: single bytes are taken apart and together again (× 1.7)
REDUCE_HEADS = 4  # of one token, joined by one program
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _find_sequence(cu_query, tile, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence whose tiles include `tile`: sequence s begins at tile cu_query[s] // BLOCK_Q + s."""
    low, high = tl.cast(tile * 0, tl.int32), tl.cast(tile * 0 + num_sequences, tl.int32)
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_query + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend(
    q_ptr, k_cache, v_cache, k_scale, v_scale, out_ptr, peak_ptr, total_ptr, cu_query, context_len, block_table,
    selected, q_row, q_head, table_row, num_heads, kv_heads, num_blocks, table_keys, num_sequences, num_segments,
    num_selected, segment_keys, scale_log2, window, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, WINDOWED: tl.constexpr,
    INT8: tl.constexpr, FAST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.program_id(0), tl.cast(tl.program_id(1), tl.int64)
    sequence = _find_sequence(cu_query, tile, num_sequences, BLOCK_Q)
    start = tl.load(cu_query + sequence)
    length = tl.load(cu_query + sequence + 1) - start
    first = (tile - (start // BLOCK_Q + sequence)) * BLOCK_Q
    if first >= length:
        return
    context = tl.load(context_len + sequence)
    index = tl.arange(0, BLOCK_M)
    query_M = first + index // GROUP
    head_M = kv_head * GROUP + index % GROUP
    inside_M = (index < BLOCK_Q * GROUP) & (query_M < length)
    lowest = context - length + first
    highest = tl.minimum(context - length + tl.minimum(first + BLOCK_Q, length), table_keys) - 1
    position_M = context - length + query_M
    row_M = tl.cast(start + query_M, tl.int64)
    column = tl.arange(0, BLOCK_D)
    mask = inside_M[:, None] & (column < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + (row_M * q_row + head_M * q_head)[:, None] + column[None, :], mask=mask, other=0.0)
    table = block_table + tl.cast(sequence, tl.int64) * table_row
    LISTS: tl.constexpr = selected is not None
    chosen = block_table
    list_keys = 0
    if LISTS:
        chosen = selected + tl.cast(sequence, tl.int64) * num_selected
        list_keys = num_selected * PAGE

    begin = 0
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N * BLOCK_N
    if SPLIT:
        segment = tl.program_id(2)
        if segment < num_segments:
            from_key = tl.maximum(segment * segment_keys, begin)
            to_key = tl.minimum((segment + 1) * segment_keys, highest + 1)
            if from_key >= to_key:  # no row sees a key of it: `_reduce` passes over it
                return
            acc, peak, total = segment_sums(
                q, position_M, lowest, highest, from_key, to_key, table, chosen, k_cache, v_cache, k_scale, v_scale,
                kv_head, kv_heads, num_blocks, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, WINDOWED,
                INT8, FAST, False,
            )  # fmt: skip
            _store_part(
                out_ptr, peak_ptr, total_ptr, acc, peak, total, row_M, head_M, inside_M, num_heads, segment,
                tl.num_programs(2), HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        else:
            from_key = (segment - num_segments) * segment_keys
            acc, peak, total = segment_sums(
                q, position_M, lowest, highest, from_key, tl.minimum(from_key + segment_keys, list_keys), table, chosen,
                k_cache, v_cache, k_scale, v_scale, kv_head, kv_heads, num_blocks, scale_log2, window, HEAD_DIM,
                BLOCK_D, BLOCK_M, BLOCK_N, PAGE, WINDOWED, INT8, FAST, LISTS,
            )  # fmt: skip
            _store_part(
                out_ptr, peak_ptr, total_ptr, acc, peak, total, row_M, head_M, inside_M, num_heads, segment,
                tl.num_programs(2), HEAD_DIM, BLOCK_D,
            )  # fmt: skip
    else:
        acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for segment in range(begin // segment_keys, tl.cdiv(highest + 1, segment_keys)):
            from_key = tl.maximum(segment * segment_keys, begin)
            to_key = tl.minimum((segment + 1) * segment_keys, highest + 1)
            part, part_peak, part_total = segment_sums(
                q, position_M, lowest, highest, from_key, to_key, table, chosen, k_cache, v_cache, k_scale, v_scale,
                kv_head, kv_heads, num_blocks, scale_log2, window, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, WINDOWED,
                INT8, FAST, False,
            )  # fmt: skip
            acc, peak, total = join(acc, peak, total, part, part_peak, part_total)
        if LISTS:
            for from_key in range(0, list_keys, segment_keys):
                part, part_peak, part_total = segment_sums(
                    q, position_M, lowest, highest, from_key, tl.minimum(from_key + segment_keys, list_keys), table,
                    chosen, k_cache, v_cache, k_scale, v_scale, kv_head, kv_heads, num_blocks, scale_log2, window,
                    HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, PAGE, WINDOWED, INT8, FAST, True,
                )  # fmt: skip
                acc, peak, total = join(acc, peak, total, part, part_peak, part_total)
        place_M = row_M * num_heads + head_M
        acc = acc / tl.where(total == 0.0, 1.0, total)[None, :]
        # A row beyond the block table is NaN too.
        acc = tl.where((position_M < table_keys)[None, :], acc, float("nan"))
        out = out_ptr + place_M[None, :] * HEAD_DIM + column[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=inside_M[None, :] & (column < HEAD_DIM)[:, None])


@triton.jit
def _store_part(
    out_ptr, peak_ptr, total_ptr, acc, peak, total, row_M, head_M, inside_M, num_heads, segment, num_parts,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    place_M = (row_M * num_heads + head_M) * num_parts + segment
    tl.store(peak_ptr + place_M, peak, mask=inside_M)
    tl.store(total_ptr + place_M, total, mask=inside_M)
    mask = inside_M[None, :] & (column < HEAD_DIM)[:, None]
    tl.store(out_ptr + place_M[None, :] * HEAD_DIM + column[:, None], acc, mask=mask)


@triton.jit
def _join_part(acc, peak, total, part_ptr, peak_ptr, total_ptr, place, inside, mask, column, HEAD_DIM: tl.constexpr):
    part_peak = tl.load(peak_ptr + place, mask=inside, other=float("-inf"))
    part_total = tl.load(total_ptr + place, mask=inside, other=0.0)
    part = tl.load(part_ptr + place[None, :] * HEAD_DIM + column[:, None], mask=mask, other=0.0)
    return join(acc, peak, total, part, part_peak, part_total)


@triton.jit
def _reduce(
    part_ptr, peak_ptr, total_ptr, out_ptr, cu_query, context_len, num_sequences, num_heads, num_segments, num_parts,
    segment_keys, table_keys, window,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Join the parts of ROWS heads of one token: the segments that it sees, then the selected blocks'."""
    token = tl.program_id(0)
    low, high = tl.cast(token * 0, tl.int32), tl.cast(token * 0 + num_sequences, tl.int32)
    while low < high:  # the sequence whose rows include `token`: the last that begins at or before it
        middle = (low + high) // 2
        if tl.load(cu_query + middle) <= token:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    position = tl.load(context_len + sequence) - tl.load(cu_query + sequence + 1) + token
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = head < num_heads
    mask = inside[None, :] & (column < HEAD_DIM)[:, None]
    row = tl.cast(token, tl.int64) * num_heads + head
    acc = tl.zeros((BLOCK_D, ROWS), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(position - window + 1, 0) // segment_keys
    for segment in range(begin, tl.minimum(tl.cdiv(position + 1, segment_keys), num_segments)):
        acc, peak, total = _join_part(
            acc, peak, total, part_ptr, peak_ptr, total_ptr, row * num_parts + segment, inside, mask, column, HEAD_DIM
        )
    for segment in range(num_segments, num_parts):
        acc, peak, total = _join_part(
            acc, peak, total, part_ptr, peak_ptr, total_ptr, row * num_parts + segment, inside, mask, column, HEAD_DIM
        )
    acc = acc / tl.where(total == 0.0, 1.0, total)[None, :]
    acc = tl.where(position < table_keys, acc, float("nan"))
    tl.store(out_ptr + row[None, :] * HEAD_DIM + column[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


def supports(q: torch.Tensor, k_cache: torch.Tensor) -> bool:
    """Dtypes, head sizes and groups that the kernels take; others run on torch."""
    cache_fits = k_cache.dtype in (q.dtype, torch.int8)
    group = q.shape[1] // k_cache.shape[1]
    whole_words = k_cache.dtype != torch.int8 or q.shape[2] % CODES_A_WORD == 0
    return (
        q.dtype in QUERY_DTYPES and cache_fits and whole_words and q.shape[2] <= MAX_HEAD_DIM and group <= PREFILL_ROWS
    )


@cache
def _subtracts_pairs(device: torch.device) -> bool:
    """Whether there is an instruction for the difference of two pairs of bfloat16, which INT8 codes are widened by."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def segment_keys_for(num_sequences: int, kv_heads: int, max_context: int, num_processors: int) -> int:
    """Keys of a segment that give every multiprocessor two blocks: the fast mode, whose bits depend on the batch."""
    segments = max(1, -(-2 * num_processors // max(num_sequences * kv_heads, 1)))
    keys = -(-max_context // segments)
    return max(-(-keys // BLOCK_N) * BLOCK_N, LEAST_SEGMENT)


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_len_S: torch.Tensor,
    block_table_SB: torch.Tensor,
    scale: float,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    selected_SN: torch.Tensor | None = None,
    *,
    segment_keys: int = SEGMENT_KEYS,
) -> torch.Tensor:
    """`kernels.paged_attention` on tensors that passed its checks of shapes. Nothing waits for the device, so lengths
    are not checked and a block id outside the cache gives NaN. `segment_keys`, a multiple of BLOCK_N, is part of the
    result's bits.
    """
    num_tokens, num_heads, head_dim = q_THD.shape
    num_blocks, kv_heads, page, _ = k_cache.shape
    num_sequences, num_pages = block_table_SB.shape
    if segment_keys < BLOCK_N or segment_keys % BLOCK_N:
        raise ValueError(f"segment_keys={segment_keys}; a multiple of {BLOCK_N} is needed")
    q = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    table = block_table_SB if block_table_SB.stride(1) == 1 else block_table_SB.contiguous()
    out = torch.empty(q_THD.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    group, block_d = num_heads // kv_heads, max(triton.next_power_of_2(head_dim), 16)
    num_segments = triton.cdiv(num_pages * page, segment_keys)
    num_selected = 0 if selected_SN is None else selected_SN.shape[1]
    num_parts = num_segments + triton.cdiv(num_selected * page, segment_keys)
    # Single tokens: few blocks without a split. Sequences without new tokens do not matter.
    single = num_tokens <= num_sequences
    split = single and num_parts > 1
    # In float32 there are no tensor cores, and the order in which weights are added depends on the tile.
    few = single and q.dtype != torch.float32
    rows = max(DECODE_ROWS, triton.next_power_of_2(group)) if few else PREFILL_ROWS
    int8, pages = k_scale is not None, (k_cache, v_cache)
    if int8:
        pages = k_cache.view(torch.int32), v_cache.view(torch.int32)
    parts, peak, total = out, out, out
    if split:
        statistics = torch.empty((2, num_tokens, num_heads, num_parts), dtype=torch.float32, device=q.device)
        peak, total = statistics.unbind()
        parts = torch.empty((num_tokens, num_heads, num_parts, head_dim), dtype=torch.float32, device=q.device)
    tiles = num_tokens // (rows // group) + num_sequences
    _attend[(tiles, kv_heads, num_parts if split else 1)](
        q, *pages, k_scale, v_scale, parts, peak, total, cu_query_S1, context_len_S, table,
        selected_SN.contiguous() if selected_SN is not None and num_selected else None,
        q.stride(0), q.stride(1), table.stride(0), num_heads, kv_heads, num_blocks, num_pages * page, num_sequences,
        num_segments, num_selected, segment_keys, scale * LOG2_E, window or 0,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=rows, BLOCK_N=BLOCK_N, GROUP=group, PAGE=page,
        WINDOWED=window is not None, INT8=int8, FAST=q.dtype == torch.bfloat16 and _subtracts_pairs(q.device),
        SPLIT=split, num_warps=WARPS, num_stages=DECODE_STAGES if single else PREFILL_STAGES,
    )  # fmt: skip
    if split:
        _reduce[(num_tokens, triton.cdiv(num_heads, REDUCE_HEADS))](
            parts, peak, total, out, cu_query_S1, context_len_S, num_sequences, num_heads, num_segments, num_parts,
            segment_keys, num_pages * page, window or 0,
            HEAD_DIM=head_dim, BLOCK_D=block_d, ROWS=REDUCE_HEADS, WINDOWED=window is not None,
        )  # fmt: skip
    return out


def variants() -> Iterator[Variant]:
    """Decode and prefill with half-precision and INT8 pages; other head sizes and page sizes as rarer ones."""
    cases = [(128, "bf16", int8, split, False, 16) for int8 in (False, True) for split in (False, True)]
    quick = {*cases}
    cases += [(64, "bf16", True, True, False, 16), (64, "fp16", False, True, True, 32)]
    cases += [
        (256, "bf16", False, True, False, 512),
        (96, "bf16", False, False, True, 128),
        (192, "bf16", True, True, False, 64),
    ]
    listed = [(128, "bf16", False, True, True, 16), (128, "bf16", False, False, True, 64)]
    for (head_dim, dtype, int8, split, windowed, page), lists in [
        *((case, False) for case in cases),
        *((case, True) for case in listed),
    ]:
        scales = ("k_scale", "v_scale")
        pages = dict.fromkeys(("k_cache", "v_cache"), "*i32:16" if int8 else f"*{dtype}:16")
        integers = ("num_heads", "kv_heads", "num_blocks", "num_sequences", "num_segments", "num_selected", "window")
        yield Variant(
            label=f"{'decode' if split else 'prefill'} hd{head_dim} {dtype}{' int8 pages' * int8}"
            f"{' window' * windowed}{' and selected blocks' * lists} block size {page}",
            kernel=_attend,
            arguments={"q_ptr": f"*{dtype}:16", "out_ptr": "*fp32:16" if split else f"*{dtype}:16"}
            | pages
            | (dict.fromkeys(scales, "*fp32:16") if int8 else {})
            | dict.fromkeys(("peak_ptr", "total_ptr"), "*fp32:16" if split else f"*{dtype}:16")
            | dict.fromkeys(("cu_query", "context_len", "block_table"), "*i32:16")
            | dict.fromkeys(("q_row", "q_head", "segment_keys"), "i32:16")
            | dict.fromkeys((*integers, "table_row", "table_keys"), "i32")
            | ({"selected": "*i32:16"} if lists else {})
            | {"scale_log2": "fp32"},
            constants=({} if int8 else dict.fromkeys(scales))
            | ({} if lists else {"selected": None})
            | {
                "HEAD_DIM": head_dim,
                "BLOCK_D": triton.next_power_of_2(head_dim),
                "BLOCK_M": DECODE_ROWS if split else PREFILL_ROWS,
            }
            | {"BLOCK_N": BLOCK_N, "GROUP": 4, "PAGE": page, "WINDOWED": windowed, "INT8": int8, "SPLIT": split}
            | {"FAST": dtype == "bf16"},
            num_warps=WARPS,
            num_stages=DECODE_STAGES if split else PREFILL_STAGES,
            # Prefill of 64 rows spills 312 bytes, and is 14 % faster on an H100 than with 32 rows, which spill none.
            hot=split and head_dim <= 128,
            full=(head_dim, dtype, int8, split, windowed, page) not in quick,
        )
    yield Variant(
        label="join hd128 bf16",
        kernel=_reduce,
        arguments=dict.fromkeys(("part_ptr", "peak_ptr", "total_ptr"), "*fp32:16")
        | dict.fromkeys(("cu_query", "context_len"), "*i32:16")
        | dict.fromkeys(("num_sequences", "num_heads", "num_segments", "num_parts", "table_keys", "window"), "i32")
        | {"out_ptr": "*bf16:16", "segment_keys": "i32:16"},
        constants={"HEAD_DIM": 128, "BLOCK_D": 128, "ROWS": REDUCE_HEADS, "WINDOWED": False},
    )
