"""Which blocks of keys a row chooses, compared with scores in 64 bits and a sort, in shapes that kernels cut up."""

from __future__ import annotations

import pytest
import torch

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.key_blocks import KeyBlocks
from penjing.kernels.key_blocks import mask_of_blocks, score_torch
from tests.kernels.choosing import Layer
from tests.kernels.cpu import needs_extension

pytestmark = needs_extension

BLOCKS = KeyBlocks(16, 1, 2, 8)


def chosen(layer: Layer, row: int, head: int) -> set[int]:
    """Blocks that a row reads by a stable sort of scores in 64 bits."""
    blocks, group = layer.blocks, layer.q.shape[1] // layer.kv_heads
    own = row // blocks.block
    first, last = blocks.sink, own - blocks.window + 1
    page_of = layer.table[0].long()
    summary, scale = (
        x[page_of, head].flatten(0, 1)[first:last] for x in (layer.summary, layer.summary_scale)
    )  # blocks of a page stand side by side
    value = score_torch(layer.q[row, head * group : (head + 1) * group], summary, scale, layer.dim**-0.5)
    order = value.argsort(descending=True, stable=True)[: blocks.budget - blocks.sink - blocks.window]
    return {*range(first), *range(last, own + 1), *(first + int(i) for i in order)}


def check(layer: Layer) -> None:
    """Run the context, the last row alone, and compare its choice."""
    row = layer.context - 1
    layer.run(0, row)
    layer.run(row, layer.context)
    for head in range(layer.kv_heads):
        got = layer.masks[0, head].tolist()
        assert got == mask_of_blocks(chosen(layer, row, head), layer.blocks, len(got)), head


@pytest.mark.parametrize("scored", [6, 15, 16, 17, 31, 32, 33, 49])
def test_any_number_of_scored_blocks(isa: CpuExtension, scored: int) -> None:
    """They are scored 16 at a time, and fetched before."""
    layer = Layer(isa, (BLOCKS.sink + scored + BLOCKS.window) * BLOCKS.block, BLOCKS, 16, torch.float32, seed=scored)
    assert BLOCKS.num_scored(layer.context - 1) == scored
    check(layer)


@pytest.mark.parametrize("dim", [2, 6, 18, 32, 64, 80, 514])
def test_heads_of_any_size(isa: CpuExtension, dim: int) -> None:
    """Words of four dimensions, and vectors of words, that are not full; sums in two parts beyond 512 dimensions."""
    check(Layer(isa, 420, BLOCKS, 64, torch.float32, dim=dim))


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (4, 1), (9, 1), (10, 2)])
def test_heads_that_share_keys(isa: CpuExtension, heads: tuple[int, int]) -> None:
    check(Layer(isa, 420, BLOCKS, 32, torch.int8, heads=heads))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_of_equal_blocks_the_first_are_taken(isa: CpuExtension, block: int) -> None:
    blocks = KeyBlocks(block, 1, 1, 6)
    layer = Layer(isa, 30 * block, blocks, 64, torch.float32)
    layer.keys = layer.keys[:block].repeat(30, 1, 1)
    layer.keys[7 * block : 8 * block] = layer.q[-1].view(layer.kv_heads, -1, layer.dim).mean(1)  # stands out
    layer.run(0, layer.context)
    for head in range(layer.kv_heads):
        got = layer.masks[-1, head].tolist()
        assert got == mask_of_blocks({0, 1, 2, 3, 7, 29}, blocks, len(got))


def test_queries_of_zeros_choose_the_first(isa: CpuExtension) -> None:
    layer = Layer(isa, 420, BLOCKS, 16, torch.float32)
    layer.q[-1] = 0
    layer.run(0, layer.context)
    own = 419 // 16
    for head in range(layer.kv_heads):
        got = layer.masks[-1, head].tolist()
        assert got == mask_of_blocks({*range(6), own - 1, own}, BLOCKS, len(got))


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_queries_of_any_size(isa: CpuExtension, size: float) -> None:
    """They are rounded to 16 bits by their own largest value."""
    layer = Layer(isa, 420, BLOCKS, 16, torch.float32)
    layer.q[-1] *= size
    layer.keys *= 1 / size
    check(layer)
