"""Causal attention of blocks of queries to chosen blocks of keys: for hashed (LSH) and key-block attention.

Tokens may come in any order (sorted by bucket, say): `positions` tell which key lies in a query's past. Shapes: B
sequences, H heads, KV key heads, T tokens, D head size, Q = ⌈T / block_size⌉ blocks, J entries of a list.
"""

from __future__ import annotations

import torch

from penjing.kernels.dispatch import gpu_kernels
from penjing.kernels.gpu.block_lists import listed

BLOCK_SIZES = (16, 32, 64, 128)


def block_sparse_attention(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    key_blocks_BKQJ: torch.Tensor,
    *,
    block_size: int,
    positions_BKT: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q · kᵀ × scale) · v over the keys of the listed blocks whose position is not after the query's.

    A query that sees no key gets zeros. Differentiable. On a GPU time and memory follow the lists' length, for block
    size × head size of up to 64 × 128 (float32: 32 × 64); larger ones run on torch.

    Args:
        q_BHTD: (B, H, T, D) floating, T ≥ 1.
        k_BKTD, v_BKTD: (B, KV, T, D) of the same type; H is a multiple of KV.
        key_blocks_BKQJ: (B, KV, Q, J) int32 or int64: blocks of keys that a block of queries sees, each once; −1 for
            none.
        block_size: tokens of a block: 16, 32, 64 or 128.
        positions_BKT: (B, KV, T) integer; 0 … T − 1 when None.
        scale: 1 / √D when None.

    Returns:
        (B, H, T, D), dtype of q.

    Raises:
        ValueError: shapes, types or a block size that do not fit; a block outside [−1, Q) (on a GPU it is passed over).
    """
    _check(q_BHTD, k_BKTD, v_BKTD, key_blocks_BKQJ, block_size, positions_BKT)
    factor = float(q_BHTD.shape[-1] ** -0.5 if scale is None else scale)
    if positions_BKT is None:
        positions_BKT = torch.arange(q_BHTD.shape[2], device=q_BHTD.device).expand(k_BKTD.shape[:3])
    gpu = gpu_kernels("block_sparse_attention", q_BHTD, k_BKTD, v_BKTD, key_blocks_BKQJ, positions_BKT)
    attend = block_sparse_attention_torch
    if gpu is not None and gpu.takes(q_BHTD, k_BKTD, v_BKTD, block_size):
        attend = gpu.block_sparse_attention
    return attend(q_BHTD, k_BKTD, v_BKTD, key_blocks_BKQJ, block_size, positions_BKT, factor)


def block_sparse_attention_torch(
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    key_blocks_BKQJ: torch.Tensor,
    block_size: int,
    positions_BKT: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The reference of `block_sparse_attention`: all T × T scores; differentiable."""
    num_tokens, num_blocks = q_BHTD.shape[2], key_blocks_BKQJ.shape[2]
    if key_blocks_BKQJ.device.type == "cpu" and key_blocks_BKQJ.numel():
        low, high = (int(value) for value in torch.aminmax(key_blocks_BKQJ))
        if low < -1 or high >= num_blocks:
            raise ValueError(f"key blocks {low} … {high} are outside −1 … {num_blocks - 1}")
    seen = listed(key_blocks_BKQJ)
    seen = seen.repeat_interleave(block_size, -2).repeat_interleave(block_size, -1)[..., :num_tokens, :num_tokens]
    seen = seen & (positions_BKT[..., :, None] >= positions_BKT[..., None, :])
    group = q_BHTD.shape[1] // k_BKTD.shape[1]
    k, v, seen = (x.repeat_interleave(group, 1) for x in (k_BKTD, v_BKTD, seen))
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    scores = (q_BHTD @ k.transpose(-1, -2)).to(wide) * scale
    # Finite, so that a row without keys has no NaN in its gradient; its weights are set to zero after.
    weights = scores.masked_fill(~seen, torch.finfo(wide).min).softmax(-1).masked_fill(~seen, 0.0)
    return weights.to(v.dtype) @ v


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_blocks: torch.Tensor,
    block_size: int,
    positions: torch.Tensor | None,
) -> None:
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size={block_size}; one of {BLOCK_SIZES} is needed")
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape or 0 in q.shape or 0 in k.shape:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} are not (B, H|KV, T ≥ 1, D)")
    batch, kv_heads, tokens, head_dim = k.shape
    if (q.shape[0], *q.shape[2:]) != (batch, tokens, head_dim) or q.shape[1] % kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit k {tuple(k.shape)}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; one floating type is needed")
    blocks = (batch, kv_heads, -(-tokens // block_size))
    if key_blocks.dim() != 4 or key_blocks.shape[:3] != blocks or key_blocks.dtype not in (torch.int32, torch.int64):
        given = f"key_blocks is {tuple(key_blocks.shape)} {key_blocks.dtype}"
        raise ValueError(f"{given}; integer {blocks} + (J,) is needed")
    if positions is not None and (positions.shape != k.shape[:3] or positions.is_floating_point()):
        raise ValueError(f"positions is {tuple(positions.shape)} {positions.dtype}; integer {k.shape[:3]} is needed")
