"""One layer of attention that reads chosen blocks of keys, for tests of its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.key_blocks import MASK_KEYS, TILE_KEYS, KeyBlocks, LayerBlocks
from penjing.kernels.cpu.kv_layout import LayerCache

HEADS, KV_HEADS, DIM = 6, 2, 20


class Layer:
    """Keys and values of one sequence in pages drawn at random, with the summaries of its blocks."""

    def __init__(
        self,
        kernels: CpuExtension,
        context: int,
        blocks: KeyBlocks,
        page: int,
        dtype: torch.dtype,
        seed: int = 0,
        heads: tuple[int, int] = (HEADS, KV_HEADS),
        dim: int = DIM,
        turned: bool = False,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.kernels, self.blocks, self.page, self.context = kernels, blocks, page, context
        self.kv_heads, self.dim, self.turned = heads[1], dim, turned
        self.q, k, v = (
            torch.randn(context, count, dim, generator=generator) * size
            for count, size in ((heads[0], 2.0), (heads[1], 1.0), (heads[1], 1.0))
        )
        pages = -(-context // page)
        int8 = dtype == torch.int8
        self.k = torch.full((pages + 2, self.kv_heads, page, dim), 0 if int8 else torch.nan, dtype=dtype)
        self.v = self.k.clone()
        scales = [torch.full(self.k.shape[:3], torch.nan) for _ in range(2)] if int8 else [None, None]
        self.k_scale, self.v_scale = scales
        self.table = torch.randperm(pages + 2, generator=torch.Generator().manual_seed(seed + 1))[None, :pages].int()
        shape = blocks.summary_shape(pages + 2, self.kv_heads, page, dim)
        self.summary, self.summary_scale = torch.zeros(shape, dtype=torch.int8), torch.full(shape[:-1], torch.nan)
        self.keys, self.values = k, v
        self.masks = torch.zeros(0, dtype=torch.uint8)

    def slots(self, begin: int, end: int) -> Tensor:
        position = torch.arange(begin, end)
        return self.table[0].long()[position // self.page] * self.page + position % self.page

    def run(self, begin: int, end: int) -> Tensor:
        """Store the tokens begin … end − 1 and attend their rows, (end − begin, heads, dim)."""
        slots = self.slots(begin, end)
        caches = self.k, self.v
        scales = self.k_scale, self.v_scale
        new = self.keys[begin:end], self.values[begin:end]
        self.kernels.write_kv(*new, *caches, slots, *scales, turned=self.turned)
        self.masks = torch.full((end - begin, self.kv_heads, -(-end // TILE_KEYS)), 15, dtype=torch.uint8)
        chooses = LayerBlocks(self.blocks, self.summary, self.summary_scale, slots, self.masks)
        lengths = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int(), self.table
        arguments = self.q[begin:end].contiguous(), *caches, *lengths, self.dim**-0.5, None, *scales
        return self.kernels.paged_attention(*arguments, chooses, turned=self.turned)

    def stored(self) -> tuple[Tensor, Tensor]:
        """(context, kv_heads, dim) as they lie in the pages."""
        cache = LayerCache(self.k, self.v, self.k_scale, self.v_scale)
        slots = self.slots(0, self.context)
        rows = [
            (slots // self.page * self.kv_heads + head) * self.page + slots % self.page for head in range(self.kv_heads)
        ]
        k, v = zip(*(cache.gather(row) for row in rows), strict=True)
        return torch.stack(k, 1), torch.stack(v, 1)


def seen_of(masks: Tensor, head: int, context: int) -> Tensor:
    """(rows, context) bool of what the masks let the rows of a head of keys see, the order of time aside."""
    bits = (masks[:, head, :, None] >> torch.arange(TILE_KEYS // MASK_KEYS).to(torch.uint8)) & 1
    return bits.flatten(1).repeat_interleave(MASK_KEYS, 1)[:, :context].bool()
