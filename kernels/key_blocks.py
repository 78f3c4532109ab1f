"""Attention that reads a window and chosen blocks of older keys: which ones, and what is kept to choose by.

Keys lie in blocks of 16, 32 or 64, counted from a sequence's first. A row at position p reads its own block and those
of the window before it, the first blocks (the sink), and of the others those that score best, `budget` blocks in all;
it reads everything where there are no more. Of each full block a summary is kept: for each dimension of a head the
middle between its least and its largest value, and half of their distance, both in INT8 with a scale each. A block's
score for a query q is q · middle + REACH × |q| · half. With a reach of 1 this is the bound of Quest
(https://arxiv.org/abs/2406.10774), which no product of the query with a key of the block exceeds; below half of it lies
what finds more of the attention. Heads that share keys share the choice.

A choice depends on a row's position, its queries and the keys before it, so a row's result has the same bits in any
batch, whether its token is of a prompt or of an answer. The kernels are `kernels/cpu/select.cpp`; what is here in torch
are their references.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.kernels.cpu.key_blocks import MASK_KEYS, TILE_KEYS, KeyBlocks
from penjing.kernels.cpu.kv_layout import LayerCache
from penjing.kernels.quantize import quantize_per_token_torch

REACH = 0.4


def summarize_torch(cache: LayerCache, blocks: KeyBlocks, block_ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Summaries of all blocks of keys in the given pages.

    Returns:
        (N, num_kv_heads, block_size / block, 2, head_dim) int8, and their scales.
    """
    _, kv_heads, size, head_dim = cache.k.shape
    k = cache.k[block_ids_N].to(torch.float32)
    if cache.k_scale is not None:
        k = k * cache.k_scale[block_ids_N][..., None]
    k = k.view(len(block_ids_N), kv_heads, size // blocks.block, blocks.block, head_dim)
    low, high = k.amin(3), k.amax(3)
    both = torch.stack([(low + high) * 0.5, (high - low) * 0.5], 3)
    q, scale = quantize_per_token_torch(both.reshape(-1, head_dim))
    return q.view(both.shape), scale.view(both.shape[:-1])


def score_torch(q_GD: Tensor, summary_B2D: Tensor, scale_B2: Tensor, scale: float) -> Tensor:
    """What each of B blocks counts for G query heads of one head of keys, (B,) float64: the more the better."""
    middle_BD, half_BD = (summary_B2D.double() * scale_B2.double()[..., None]).unbind(1)
    q = q_GD.double() * scale
    return torch.softmax(q @ middle_BD.T + REACH * q.abs() @ half_BD.T, -1).sum(0)


def mask_of_blocks(chosen: set[int], blocks: KeyBlocks, num_tiles: int) -> list[int]:
    """The bytes of a row's mask that reads the blocks `chosen`."""
    bits, masks = blocks.block // MASK_KEYS, [0] * num_tiles
    for block in chosen:
        for bit in range(block * bits, (block + 1) * bits):
            masks[bit * MASK_KEYS // TILE_KEYS] |= 1 << bit % (TILE_KEYS // MASK_KEYS)
    return masks
