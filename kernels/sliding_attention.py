"""Causal attention within a window, exact, in time and memory proportional to tokens × window.

Queries are taken in blocks; a block attends to its own keys and to the window before it, cut out of the keys by a
strided view. No mask of tokens × tokens exists, forward or backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 128  # queries; 64 … 256 are equally fast on a CPU, more wastes work on masked keys


def sliding_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int) -> Tensor:
    """Attention of each token to itself and the window − 1 tokens before it, scaled by 1/√D; differentiable.

    Args:
        q_BHTD: (B, H, T, D) floating.
        k_BKTD, v_BKTD: (B, KV, T, D) and (B, KV, T, any); H is a multiple of KV.
        window: keys that a query sees, itself included, > 0.

    Returns:
        (B, H, T, D) of v's last size.

    Raises:
        ValueError: shapes that do not fit, or a window below 1.
    """
    if q_BHTD.dim() != 4 or k_BKTD.shape[:3] != v_BKTD.shape[:3] or q_BHTD.shape[1] % k_BKTD.shape[1] or window < 1:
        raise ValueError(
            f"q has shape {tuple(q_BHTD.shape)}, k {tuple(k_BKTD.shape)}, v {tuple(v_BKTD.shape)}, window {window}; "
            "(B, H, T, D), (B, KV, T, D), (B, KV, T, any) and 1 or more are needed"
        )
    batch, heads, num_tokens, size = q_BHTD.shape
    kv_heads = k_BKTD.shape[1]
    if window + _BLOCK >= num_tokens:  # a block's keys would be the whole sequence
        mask_TT = None if window >= num_tokens else _band(num_tokens, num_tokens, 0, window, q_BHTD.device)
        return F.scaled_dot_product_attention(
            q_BHTD, k_BKTD, v_BKTD, attn_mask=mask_TT, is_causal=mask_TT is None, enable_gqa=heads != kv_heads
        )
    num_blocks = -(-num_tokens // _BLOCK)
    padding, before = num_blocks * _BLOCK - num_tokens, window - 1
    num_keys = before + _BLOCK
    # (B × KV, blocks, keys, D): views that overlap; the queries of a block's group of heads share its keys.
    k, v = (
        F.pad(x, (0, 0, before, padding)).flatten(0, 1).unfold(1, num_keys, _BLOCK).transpose(-1, -2)
        for x in (k_BKTD, v_BKTD)
    )
    group = heads // kv_heads
    q = F.pad(q_BHTD, (0, 0, 0, padding)).reshape(batch * kv_heads, group, num_blocks, _BLOCK, size)
    q = q.transpose(1, 2).reshape(batch * kv_heads, num_blocks, group * _BLOCK, size)
    band_QL = _band(_BLOCK, num_keys, before, window, q.device)
    first_key = torch.arange(num_blocks, device=q.device)[:, None] * _BLOCK - before
    exists_NL = first_key + torch.arange(num_keys, device=q.device) >= 0
    mask_NQL = (band_QL & exists_NL[:, None]).repeat(1, group, 1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_NQL)
    out = out.unflatten(2, (group, _BLOCK)).transpose(1, 2).reshape(batch, heads, num_blocks * _BLOCK, -1)
    return out[:, :, :num_tokens]


def _band(num_queries: int, num_keys: int, first_query: int, window: int, device: torch.device) -> Tensor:
    """(queries, keys) bool: query i, at key first_query + i, sees that key and the window − 1 before it."""
    query = torch.arange(num_queries, device=device)[:, None] + first_query
    key = torch.arange(num_keys, device=device)
    return (key <= query) & (key > query - window)
