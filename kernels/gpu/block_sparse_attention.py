"""`block_sparse_attention` in the Triton language: FlashAttention's two passes over lists of blocks."""
# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from penjing.kernels.gpu.block_lists import listed
from penjing.kernels.gpu.flash_attention import LOG2_E
from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import NAMES

# Block size × head size: beyond, registers do not hold the accumulators; float32 multiplies without tensor cores.
MAX_TILE = {torch.float16: 64 * 128, torch.bfloat16: 64 * 128, torch.float32: 32 * 64}
# Block size → warps and stages of the forward pass, of the backward pass.
OPTIONS = {16: (4, 2, 4, 2), 32: (4, 2, 4, 2), 64: (4, 2, 8, 2), 128: (8, 2, 8, 1)}


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_size: int) -> bool:
    """Whether the kernels can run: one float type, a tile of at most MAX_TILE."""
    tile: int = block_size * triton.next_power_of_2(q.shape[-1])  # pyright: ignore[reportAssignmentType]
    return q.dtype == k.dtype == v.dtype and tile <= MAX_TILE.get(q.dtype, 0)


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_blocks: torch.Tensor,
    block_size: int,
    positions: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See `kernels.block_sparse_attention`; differentiable."""
    return _Attend.apply(q, k, v, key_blocks, positions, block_size, scale)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        key_blocks: torch.Tensor,
        positions: torch.Tensor,
        block_size: int,
        scale: float,
    ) -> torch.Tensor:
        q, k, v, positions = q.contiguous(), k.contiguous(), v.contiguous(), positions.to(torch.int32).contiguous()
        lists = key_blocks.to(torch.int32).contiguous()
        batch, heads, tokens, head_dim = q.shape
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        num_warps, num_stages, _, _ = OPTIONS[block_size]
        forward_kernel[(lists.shape[2], batch * heads)](
            q,
            k,
            v,
            positions,
            lists,
            out,
            lse,
            tokens,
            heads,
            k.shape[1],
            lists.shape[2],
            lists.shape[3],
            scale * LOG2_E,
            head_dim,
            max(16, triton.next_power_of_2(head_dim)),
            block_size,
            num_warps=num_warps,
            num_stages=num_stages,
        )
        ctx.save_for_backward(q, k, v, positions, lists, out, lse)
        ctx.block_size, ctx.scale = block_size, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, positions, lists, out, lse = ctx.saved_tensors
        dout = gradients[0].contiguous()
        delta = (dout.float() * out.float()).sum(-1)
        batch, heads, tokens, head_dim = q.shape
        kv_heads, num_blocks = k.shape[1], lists.shape[2]
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _, _, num_warps, num_stages = OPTIONS[ctx.block_size]
        sizes = tokens, heads, kv_heads, num_blocks
        tail = (
            ctx.scale * LOG2_E,
            ctx.scale,
            head_dim,
            max(16, triton.next_power_of_2(head_dim)),
            ctx.block_size,
        )
        options = {"num_warps": num_warps, "num_stages": num_stages}
        shared = q, k, v, dout, positions, lse, delta
        query_gradient_kernel[(num_blocks, batch * heads)](*shared, lists, dq, *sizes, lists.shape[3], *tail, **options)
        # Which blocks of queries see a block of keys, those first.
        seen = listed(lists).transpose(-1, -2).contiguous()
        readers = seen.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices.to(torch.int32)
        counts = seen.sum(-1, dtype=torch.int32)
        key_gradient_kernel[(num_blocks, batch * kv_heads)](*shared, readers, counts, dk, dv, *sizes, *tail, **options)
        return dq, dk, dv, None, None, None, None


def variants() -> Iterator[Variant]:
    """Forward and backward by block size, head size and type."""
    counts = dict.fromkeys(("tokens", "heads", "kv_heads", "num_blocks"), "i32")
    for block_size, (warps, stages, backward_warps, backward_stages) in OPTIONS.items():
        for head_dim in (64, 128, 256):
            for dtype, name in NAMES.items():
                if block_size * head_dim > MAX_TILE[dtype]:
                    continue
                pointer = f"*{name}:16"
                operands = {"q": pointer, "k": pointer, "v": pointer, "positions": "*i32:16", "lse": "*fp32:16"}
                constants = {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK": block_size}
                common = operands | counts | {"scale_log2": "fp32"}
                backward = common | {"dout": pointer, "delta": "*fp32:16", "scale": "fp32"}
                # With 128 keys a program of the key gradient spills 16 bytes a thread.
                hot = name != "fp32" and block_size <= 64 and head_dim <= 128
                full = name != "bf16" or (block_size, head_dim) not in ((64, 64), (64, 128), (128, 64))
                label = f"blocks of {block_size} hd{head_dim} {name}"
                shared: dict[str, Any] = {"constants": constants, "hot": hot, "full": full}
                yield Variant(
                    label=f"forward {label}",
                    kernel=forward_kernel,
                    arguments=common | {"lists": "*i32:16", "out": pointer, "entries": "i32"},
                    num_warps=warps,
                    num_stages=stages,
                    **shared,
                )
                shared |= {"num_warps": backward_warps, "num_stages": backward_stages}
                yield Variant(
                    label=f"query gradient {label}",
                    kernel=query_gradient_kernel,
                    arguments=backward | {"lists": "*i32:16", "dq": pointer, "entries": "i32"},
                    **shared,
                )
                yield Variant(
                    label=f"key gradient {label}",
                    kernel=key_gradient_kernel,
                    arguments=backward | {"readers": "*i32:16", "counts": "*i32:16", "dk": pointer, "dv": pointer},
                    **shared,
                )


@triton.jit
def load_block(x, row, tokens, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head's (tokens, head size) matrix, 0 outside."""
    column = tl.arange(0, BLOCK_D)
    mask = (row < tokens)[:, None] & (column < HEAD_DIM)[None, :]
    return tl.load(x + row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(x, value, row, tokens, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The inverse of `load_block`."""
    column = tl.arange(0, BLOCK_D)
    mask = (row < tokens)[:, None] & (column < HEAD_DIM)[None, :]
    place = x + row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    tl.store(place, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def scores_of(q, k, query_position, key_position, row, key, tokens, scale_log2):
    """Scores in base 2, −∞ for keys in the future or beyond the end, and for rows beyond it."""
    score = tl.dot(q, k.T, input_precision="ieee") * scale_log2
    seen = (query_position[:, None] >= key_position[None, :]) & (row < tokens)[:, None] & (key < tokens)[None, :]
    return tl.where(seen, score, float("-inf"))


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    positions,
    lists,
    out,
    lse,
    tokens,
    heads,
    kv_heads,
    num_blocks,
    entries,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // heads * kv_heads + head % heads // (heads // kv_heads)
    row = block * BLOCK + tl.arange(0, BLOCK)
    query = load_block(q + head * tokens * HEAD_DIM, row, tokens, HEAD_DIM, BLOCK_D)
    positions += kv_head * tokens
    query_position = tl.load(positions + row, mask=row < tokens, other=-1)
    lists += (kv_head * num_blocks + block) * entries
    k += kv_head * tokens * HEAD_DIM
    v += kv_head * tokens * HEAD_DIM
    top = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    acc = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for entry in range(entries):
        key_block = tl.load(lists + entry)
        if (key_block >= 0) & (key_block < num_blocks):
            key = key_block * BLOCK + tl.arange(0, BLOCK)
            keys = load_block(k, key, tokens, HEAD_DIM, BLOCK_D)
            key_position = tl.load(positions + key, mask=key < tokens, other=0)
            score = scores_of(query, keys, query_position, key_position, row, key, tokens, scale_log2)
            higher = tl.maximum(top, tl.max(score, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(score - shift[:, None])
            fade = tl.exp2(top - shift)
            values = load_block(v, key, tokens, HEAD_DIM, BLOCK_D)
            acc = tl.dot(weight.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
            total = total * fade + tl.sum(weight, axis=1)
            top = higher
    empty = total == 0.0
    result = acc / tl.where(empty, 1.0, total)[:, None]
    store_block(out + head * tokens * HEAD_DIM, result, row, tokens, HEAD_DIM, BLOCK_D)
    # +∞ for a row without keys: its weights come out as 0 in the backward pass.
    statistic = tl.where(empty, float("inf"), top + tl.log2(tl.where(empty, 1.0, total)))
    tl.store(lse + head * tokens + row, statistic, mask=row < tokens)


@triton.jit
def query_gradient_kernel(
    q,
    k,
    v,
    dout,
    positions,
    lse,
    delta,
    lists,
    dq,
    tokens,
    heads,
    kv_heads,
    num_blocks,
    entries,
    scale_log2,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // heads * kv_heads + head % heads // (heads // kv_heads)
    row = block * BLOCK + tl.arange(0, BLOCK)
    query = load_block(q + head * tokens * HEAD_DIM, row, tokens, HEAD_DIM, BLOCK_D)
    upstream = load_block(dout + head * tokens * HEAD_DIM, row, tokens, HEAD_DIM, BLOCK_D)
    statistic = tl.load(lse + head * tokens + row, mask=row < tokens, other=float("inf"))
    offset = tl.load(delta + head * tokens + row, mask=row < tokens, other=0.0)
    positions += kv_head * tokens
    query_position = tl.load(positions + row, mask=row < tokens, other=-1)
    lists += (kv_head * num_blocks + block) * entries
    k += kv_head * tokens * HEAD_DIM
    v += kv_head * tokens * HEAD_DIM
    acc = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for entry in range(entries):
        key_block = tl.load(lists + entry)
        if (key_block >= 0) & (key_block < num_blocks):
            key = key_block * BLOCK + tl.arange(0, BLOCK)
            keys = load_block(k, key, tokens, HEAD_DIM, BLOCK_D)
            key_position = tl.load(positions + key, mask=key < tokens, other=0)
            score = scores_of(query, keys, query_position, key_position, row, key, tokens, scale_log2)
            weight = tl.exp2(score - statistic[:, None])
            values = load_block(v, key, tokens, HEAD_DIM, BLOCK_D)
            change = weight * (tl.dot(upstream, values.T, input_precision="ieee") - offset[:, None])
            acc = tl.dot(change.to(keys.dtype), keys, acc, input_precision="ieee")
    store_block(dq + head * tokens * HEAD_DIM, acc * scale, row, tokens, HEAD_DIM, BLOCK_D)


@triton.jit
def key_gradient_kernel(
    q,
    k,
    v,
    dout,
    positions,
    lse,
    delta,
    readers,
    counts,
    dk,
    dv,
    tokens,
    heads,
    kv_heads,
    num_blocks,
    scale_log2,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    group = heads // kv_heads
    first_head = kv_head // kv_heads * heads + kv_head % kv_heads * group
    key = block * BLOCK + tl.arange(0, BLOCK)
    keys = load_block(k + kv_head * tokens * HEAD_DIM, key, tokens, HEAD_DIM, BLOCK_D)
    values = load_block(v + kv_head * tokens * HEAD_DIM, key, tokens, HEAD_DIM, BLOCK_D)
    positions += kv_head * tokens
    key_position = tl.load(positions + key, mask=key < tokens, other=0)
    readers += (kv_head * num_blocks + block) * num_blocks
    key_acc = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    value_acc = tl.zeros((BLOCK, BLOCK_D), dtype=tl.float32)
    for step in range(tl.load(counts + kv_head * num_blocks + block) * group):
        head = first_head + step % group
        row = tl.load(readers + step // group) * BLOCK + tl.arange(0, BLOCK)
        query = load_block(q + head * tokens * HEAD_DIM, row, tokens, HEAD_DIM, BLOCK_D)
        upstream = load_block(dout + head * tokens * HEAD_DIM, row, tokens, HEAD_DIM, BLOCK_D)
        statistic = tl.load(lse + head * tokens + row, mask=row < tokens, other=float("inf"))
        offset = tl.load(delta + head * tokens + row, mask=row < tokens, other=0.0)
        query_position = tl.load(positions + row, mask=row < tokens, other=-1)
        score = scores_of(query, keys, query_position, key_position, row, key, tokens, scale_log2)
        weight = tl.exp2(score - statistic[:, None])
        value_acc = tl.dot(weight.T.to(upstream.dtype), upstream, value_acc, input_precision="ieee")
        change = weight * (tl.dot(upstream, values.T, input_precision="ieee") - offset[:, None])
        key_acc = tl.dot(change.T.to(query.dtype), query, key_acc, input_precision="ieee")
    store_block(dk + kv_head * tokens * HEAD_DIM, key_acc * scale, key, tokens, HEAD_DIM, BLOCK_D)
    store_block(dv + kv_head * tokens * HEAD_DIM, value_acc, key, tokens, HEAD_DIM, BLOCK_D)
