# Launch options, and kernels that return values:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""`rotary` in the Triton language: rotation and its gradient, and the decoder's step before attention in one launch:
rotate queries and keys, write keys and values to their pages, in INT8 where the pages are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from penjing.kernels.gpu.registry import Variant
from penjing.kernels.gpu.rows import DTYPES, NAMES, cdiv, has_nan, round_int8, scale_of

# Heads of one program: of an H100's bandwidth 16 take 92 % where 4 take 78. Beside keys and values, which are fewer,
# more than 8 stand idle: 81 % with 8, 55 with 16.
ROTATED_HEADS, HEADS, NUM_WARPS = 16, 8, 2
MAX_ROTATED_DIM = 512


def takes(x_THD: torch.Tensor, cos_TF: torch.Tensor) -> bool:
    """Whether the kernels can run: a float type, float32 angles of the same tokens, at least one value."""
    return (
        x_THD.dtype in DTYPES
        and cos_TF.dtype == torch.float32
        and cos_TF.shape[:-1] == x_THD.shape[:-2]
        and x_THD.numel() > 0
        and x_THD.shape[-1] <= MAX_ROTATED_DIM
    )


def apply_rotary(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """See `kernels.rotary`; differentiable in `x_THD`."""
    return _Rotary.apply(x_THD, cos_TF, sin_TF)


def rotary_write_kv(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_T: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> torch.Tensor:
    """See `kernels.rotary`: the rotated queries; a slot outside the cache is skipped."""
    num_tokens, num_heads, head_dim = q_THD.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    q_THD, k_TKD, v_TKD = (_heads_contiguous(x) for x in (q_THD, k_TKD, v_TKD))
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    grid = (num_tokens, cdiv(num_heads, HEADS) + 2 * cdiv(num_kv_heads, HEADS))
    write_kernel[grid](
        q_THD,
        k_TKD,
        v_TKD,
        cos_TF.contiguous(),
        sin_TF.contiguous(),
        out_THD,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slot_T.contiguous(),
        num_blocks * block_size,
        num_heads,
        num_kv_heads,
        block_size,
        q_THD.stride(0),
        q_THD.stride(1),
        k_TKD.stride(0),
        k_TKD.stride(1),
        v_TKD.stride(0),
        v_TKD.stride(1),
        head_dim // 2,
        triton.next_power_of_2(head_dim // 2),
        HEADS,
        num_warps=NUM_WARPS,
    )
    return out_THD


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos_TF, sin_TF)
        return _rotate(x_THD, cos_TF, sin_TF, inverse=False)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _rotate(gradients[0], *ctx.saved_tensors, inverse=True), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool) -> torch.Tensor:
    x_THD = _heads_contiguous(x.reshape(-1, *x.shape[-2:]))
    num_tokens, num_heads, head_dim = x_THD.shape
    y_THD = torch.empty(x_THD.shape, dtype=x.dtype, device=x.device)
    rotate_kernel[(num_tokens, cdiv(num_heads, ROTATED_HEADS))](
        x_THD,
        cos.reshape(-1, head_dim // 2).contiguous(),
        sin.reshape(-1, head_dim // 2).contiguous(),
        y_THD,
        num_heads,
        x_THD.stride(0),
        x_THD.stride(1),
        inverse,
        head_dim // 2,
        triton.next_power_of_2(head_dim // 2),
        ROTATED_HEADS,
        num_warps=NUM_WARPS,
    )
    return y_THD.view(x.shape)


def _heads_contiguous(x_THD: torch.Tensor) -> torch.Tensor:
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


def variants() -> Iterator[Variant]:
    """Every configuration that is launched, for the usual head sizes."""
    for head_dim in (64, 96, 128, 192, 256):
        constants = {"HALF": head_dim // 2, "COLUMNS": triton.next_power_of_2(head_dim // 2), "HEADS": HEADS}
        for name in NAMES.values():
            common = {"num_warps": NUM_WARPS, "hot": True, "full": name == "fp32" or head_dim not in (64, 128)}
            angles = {"cos": "*fp32:16", "sin": "*fp32:16"}
            for inverse in (False, True):
                yield Variant(
                    label=f"{'backward' if inverse else 'forward'} hd{head_dim} {name}",
                    kernel=rotate_kernel,
                    arguments=angles
                    | {"x": f"*{name}:16", "y": f"*{name}:16", "heads": "i32"}
                    | {"token_stride": "i32:16", "head_stride": "i32:16"},
                    constants=constants | {"INVERSE": inverse, "HEADS": ROTATED_HEADS},
                    **common,
                )
            for pages in (name, "i8"):
                scales = ("k_scale", "v_scale")
                yield Variant(
                    label=f"write kv hd{head_dim} {name} pages {pages}",
                    kernel=write_kernel,
                    arguments=angles
                    | dict.fromkeys(("q", "k", "v", "out"), f"*{name}:16")
                    | dict.fromkeys(("k_cache", "v_cache"), f"*{pages}:16")
                    | {"slot": "*i64:16", "slots": "i64", "heads": "i32", "kv_heads": "i32", "block_size": "i32:16"}
                    | {f"{x}_{y}_stride": "i32:16" for x in "qkv" for y in ("token", "head")}
                    | (dict.fromkeys(scales, "*fp32:16") if pages == "i8" else {}),
                    constants=constants | ({} if pages == "i8" else dict.fromkeys(scales)),
                    **common,
                )


@triton.jit
def rotated(x, cos, sin, mask, HALF: tl.constexpr, INVERSE: tl.constexpr):
    """Heads of one token, (heads, columns) each half, rotated in fp32 and rounded to the type of `x`."""
    left = tl.load(x, mask=mask, other=0.0)
    right = tl.load(x + HALF, mask=mask, other=0.0)
    if INVERSE:
        sin = -sin
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    turned_left = wide_left * cos - wide_right * sin
    turned_right = wide_right * cos + wide_left * sin
    return turned_left.to(left.dtype), turned_right.to(left.dtype)


@triton.jit
def rotate_kernel(
    x,
    cos,
    sin,
    y,
    heads,
    token_stride,
    head_stride,
    INVERSE: tl.constexpr,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (head < heads) & (column < HALF)
    cosine = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0)
    sine = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0)
    start = x + token * token_stride + head * head_stride + column
    left, right = rotated(start, cosine, sine, mask, HALF, INVERSE)
    place = y + (token * heads + head) * (2 * HALF) + column
    tl.store(place, left, mask=mask)
    tl.store(place + HALF, right, mask=mask)


@triton.jit
def store_page(left, right, cache, scale, slot, slots, head, kv_heads, block_size, column, mask, HALF: tl.constexpr):
    """Write one token's heads to their page, as they are or in INT8 with a scale a head."""
    inside = (slot >= 0) & (slot < slots)
    row = (slot // block_size * kv_heads + head) * block_size + slot % block_size
    place = cache + row * (2 * HALF) + column
    if scale is not None:
        left, right = left.to(tl.float32), right.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
        factor = scale_of(largest, has_nan(left) | has_nan(right))[:, None]
        tl.store(scale + row, factor, mask=inside & (head < kv_heads))
        tl.store(place, round_int8(tl.div_rn(left, factor)), mask=inside & mask)
        tl.store(place + HALF, round_int8(tl.div_rn(right, factor)), mask=inside & mask)
    else:
        tl.store(place, left.to(cache.dtype.element_ty), mask=inside & mask)
        tl.store(place + HALF, right.to(cache.dtype.element_ty), mask=inside & mask)


@triton.jit
def write_kernel(
    q,
    k,
    v,
    cos,
    sin,
    out,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    slot,
    slots,
    heads,
    kv_heads,
    block_size,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    HALF: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups, kv_groups = tl.cdiv(heads, HEADS), tl.cdiv(kv_heads, HEADS)
    column = tl.arange(0, COLUMNS)[None, :]
    lane = tl.arange(0, HEADS)[:, None]
    cosine = tl.load(cos + token * HALF + column, mask=column < HALF, other=0.0)
    sine = tl.load(sin + token * HALF + column, mask=column < HALF, other=0.0)
    if group < query_groups:
        head = group * HEADS + lane
        mask = (head < heads) & (column < HALF)
        start = q + token * q_token_stride + head * q_head_stride + column
        left, right = rotated(start, cosine, sine, mask, HALF, False)
        place = out + (token * heads + head) * (2 * HALF) + column
        tl.store(place, left, mask=mask)
        tl.store(place + HALF, right, mask=mask)
    else:
        page = tl.load(slot + token)
        if group < query_groups + kv_groups:
            head = (group - query_groups) * HEADS + lane
            mask = (head < kv_heads) & (column < HALF)
            start = k + token * k_token_stride + head * k_head_stride + column
            left, right = rotated(start, cosine, sine, mask, HALF, False)
            store_page(left, right, k_cache, k_scale, page, slots, head, kv_heads, block_size, column, mask, HALF)
        else:
            head = (group - query_groups - kv_groups) * HEADS + lane
            mask = (head < kv_heads) & (column < HALF)
            start = v + token * v_token_stride + head * v_head_stride + column
            left = tl.load(start, mask=mask, other=0.0)
            right = tl.load(start + HALF, mask=mask, other=0.0)
            store_page(left, right, v_cache, v_scale, page, slots, head, kv_heads, block_size, column, mask, HALF)
