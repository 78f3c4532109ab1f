"""What a row of attention reads where it chooses: the numbers, and the tensors of what is known of blocks of keys.

See `kernels.key_blocks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

TILE_KEYS = 64  # of the C++ kernel; a byte of a mask stands for so many keys
MASK_KEYS = 16  # keys that a bit of it stands for
BLOCKS = (16, 32, 64)


@dataclass(frozen=True)
class KeyBlocks:
    """How rows choose; all but `block` in blocks."""

    block: int
    sink: int
    window: int
    budget: int

    def check(self, block_size: int) -> None:
        """Raise ValueError unless the numbers fit each other and pages of `block_size` keys."""
        if self.block not in BLOCKS or block_size % self.block:
            raise ValueError(
                f"blocks of {self.block} keys in pages of {block_size}: one of {BLOCKS} is needed that divides the page"
            )
        if self.sink < 0 or self.window < 1 or self.budget < self.sink + self.window:
            raise ValueError(
                f"a budget of {self.budget} blocks, {self.sink} of them the first and {self.window} the window: "
                "the budget must hold both, and the window at least one"
            )

    def summary_shape(self, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[int, ...]:
        """Of one layer's summaries, (num_blocks, num_kv_heads, block_size / block, 2, head_dim) int8; scales lack the
        last dimension."""
        return num_blocks, num_kv_heads, block_size // self.block, 2, head_dim

    def num_read(self, position: int) -> int:
        """Keys that a row at `position` reads."""
        own = position // self.block
        if own < self.budget:
            return position + 1
        return (self.budget - 1) * self.block + position % self.block + 1

    def num_scored(self, position: int) -> int:
        """Blocks whose summaries a row at `position` reads, to choose among them."""
        own = position // self.block
        return 0 if own < self.budget else own - self.window + 1 - self.sink


@dataclass(frozen=True)
class LayerBlocks:
    """One layer's summaries, for a call of the attention kernel alone."""

    blocks: KeyBlocks
    summary: Tensor
    """See `KeyBlocks.summary_shape`; written in place."""
    summary_scale: Tensor
    slots: Tensor | None = None
    """(T,) int64, where the keys of the call's rows lie: the summaries of blocks that they fill are written first."""
    masks: Tensor | None = None
    """(T, num_kv_heads, tiles of the longest context) uint8, filled with what rows chose if any had to."""


@dataclass(frozen=True)
class StepBlocks:
    """The summaries of a decoder's layers, for its step."""

    blocks: KeyBlocks
    full_layers: frozenset[int]
    """Layers that read everything."""
    summary: Tensor
    """Of the other layers, in their order: (layers that choose, …), see `KeyBlocks.summary_shape`; written in place."""
    summary_scale: Tensor


def bytes_of_summaries(blocks: KeyBlocks, num_kv_heads: int, block_size: int, head_dim: int) -> int:
    """Of one layer's page, scales included."""
    *rows, _ = blocks.summary_shape(1, num_kv_heads, block_size, head_dim)
    return math.prod(rows) * (head_dim + 4)
