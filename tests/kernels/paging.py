"""Random sequences laid out in a paged cache, and the float64 answer for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention


@dataclass
class Sequence:
    """One sequence: all its queries, keys and values, of which the last `num_queries` rows are new."""

    q: Tensor  # (context, H, D)
    k: Tensor  # (context, KV, D)
    v: Tensor
    num_queries: int

    @property
    def context(self) -> int:
        return len(self.k)


def draw_sequence(context: int, num_queries: int, heads: int, kv_heads: int, head_dim: int, seed: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(context, count, head_dim, generator=generator) for count in (heads, kv_heads, kv_heads))
    return Sequence(q, k, v, num_queries)


def draw(lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, seed: int = 0) -> list[Sequence]:
    """Sequences of (new tokens, context)."""
    return [
        draw_sequence(context, new, *heads, head_dim, seed=seed * 1009 + index)
        for index, (new, context) in enumerate(lengths)
    ]


class Cache:
    """One layer's pages with the sequences written to blocks drawn at random; unwritten memory (scales) is NaN."""

    def __init__(
        self,
        sequences: list[Sequence],
        block_size: int,
        seed: int,
        spare_blocks: int = 3,
        dtype: torch.dtype = torch.float32,
    ):
        _, kv_heads, head_dim = sequences[0].k.shape
        needed = [-(-sequence.context // block_size) for sequence in sequences]
        num_blocks = sum(needed) + spare_blocks
        self.block_size = block_size
        shape = num_blocks, kv_heads, block_size, head_dim
        unwritten = -128 if dtype == torch.int8 else torch.nan
        self.k, self.v = (torch.full(shape, unwritten, dtype=dtype) for _ in range(2))
        self.scales = ()
        if dtype == torch.int8:
            self.scales = torch.full(shape[:3], torch.nan), torch.full(shape[:3], torch.nan)
        free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        # Entries past a sequence's last block must not be read: −1 would be refused.
        self.table = torch.full((len(sequences), max(needed) + 1), -1, dtype=torch.int32)
        for row, (sequence, count) in enumerate(zip(sequences, needed, strict=True)):
            self.table[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
            slots = self.slots(row, 0, sequence.context)
            write_kv(sequence.k, sequence.v, self.k, self.v, slots, *self.scales)

    def slots(self, row: int, start: int, end: int) -> Tensor:
        position = torch.arange(start, end)
        return self.table[row].long()[position // self.block_size] * self.block_size + position % self.block_size

    def attend(self, queries: list[tuple[int, Tensor, int]], window: int | None) -> list[Tensor]:
        """One call for `queries`: (row of the table, q (n, H, D), keys of the sequence so far)."""
        lengths = torch.tensor([0] + [len(q) for _, q, _ in queries])
        k_scale, v_scale = self.scales or (None, None)
        out = paged_attention(
            torch.cat([q for _, q, _ in queries]),
            self.k,
            self.v,
            lengths.cumsum(0).to(torch.int32),
            torch.tensor([context for _, _, context in queries], dtype=torch.int32),
            self.table[[row for row, _, _ in queries]],
            self.k.shape[3] ** -0.5,
            window,
            k_scale,
            v_scale,
        )
        return list(out.split(lengths[1:].tolist()))

    def attend_new(self, sequences: list[Sequence], window: int | None, rows: list[int] | None = None) -> list[Tensor]:
        """One call for the new rows of the sequences at `rows` (all when None)."""
        chosen = range(len(sequences)) if rows is None else rows
        return self.attend(
            [(row, s.q[s.context - s.num_queries :], s.context) for row in chosen for s in [sequences[row]]], window
        )


def dense_attention(sequence: Sequence, window: int | None, dtype: torch.dtype = torch.float64) -> Tensor:
    """torch's attention of the new rows over the whole sequence, in `dtype`."""
    group = sequence.q.shape[1] // sequence.k.shape[1]
    q = sequence.q[sequence.context - sequence.num_queries :]
    position = torch.arange(sequence.context - sequence.num_queries, sequence.context)[:, None]
    key = torch.arange(sequence.context)
    mask = key <= position
    if window is not None:
        mask &= key > position - window
    q, k, v = (
        x.to(dtype).transpose(0, 1)
        for x in (q, sequence.k.repeat_interleave(group, 1), sequence.v.repeat_interleave(group, 1))
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
