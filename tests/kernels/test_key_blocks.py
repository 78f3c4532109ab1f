"""Attention that reads chosen blocks of keys: the choice, the result and its bits, on every instruction set."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.key_blocks import KeyBlocks, LayerBlocks
from penjing.kernels.cpu.kv_layout import LayerCache
from penjing.kernels.key_blocks import mask_of_blocks, score_torch, summarize_torch
from tests.kernels.choosing import DIM, HEADS, KV_HEADS, Layer, seen_of
from tests.kernels.cpu import needs_extension

pytestmark = needs_extension

CASES = [
    (KeyBlocks(16, 1, 2, 5), 16, 330, torch.float32),
    (KeyBlocks(16, 0, 1, 3), 64, 300, torch.int8),
    (KeyBlocks(32, 1, 2, 4), 64, 301, torch.float16),
    (KeyBlocks(64, 0, 1, 2), 64, 333, torch.int8),
    (KeyBlocks(16, 2, 3, 5), 16, 200, torch.float32),
]


@pytest.mark.parametrize(("blocks", "page", "context", "dtype"), CASES)
def test_result_is_that_of_the_chosen_keys(
    isa: CpuExtension, blocks: KeyBlocks, page: int, context: int, dtype: torch.dtype
) -> None:
    layer = Layer(isa, context, blocks, page, dtype)
    out = layer.run(0, context).double()
    k, v = layer.stored()
    group = HEADS // KV_HEADS
    for head in range(KV_HEADS):
        position = torch.arange(context)
        seen = seen_of(layer.masks, head, context) & (position <= position[:, None])
        for row in range(0, context, 7):
            assert seen[row].sum() == blocks.num_read(row)
        q = layer.q[:, head * group : (head + 1) * group].double().transpose(0, 1)
        kv = (x[:, head].double().expand(group, -1, -1) for x in (k, v))
        expected = F.scaled_dot_product_attention(q, *kv, attn_mask=seen).transpose(0, 1)
        torch.testing.assert_close(
            out[:, head * group : (head + 1) * group], expected, atol=2e-3 if dtype == torch.int8 else 1e-5, rtol=1e-4
        )


@pytest.mark.parametrize(("blocks", "page", "context", "dtype"), CASES)
def test_summaries_and_choices_are_those_of_the_reference(
    isa: CpuExtension, blocks: KeyBlocks, page: int, context: int, dtype: torch.dtype
) -> None:
    layer = Layer(isa, context, blocks, page, dtype)
    layer.run(0, context)
    cache = LayerCache(layer.k, layer.v, layer.k_scale, layer.v_scale)
    summary, scale = summarize_torch(cache, blocks, layer.table[0].long())
    full = context // blocks.block

    def by_block(x: Tensor) -> Tensor:  # (pages, heads, blocks of a page, …) → (full blocks, heads, …)
        return x.transpose(1, 2).flatten(0, 1)[:full]

    mine = by_block(layer.summary[layer.table[0].long()]), by_block(layer.summary_scale[layer.table[0].long()])
    torch.testing.assert_close(mine[1], by_block(scale), atol=0, rtol=1e-6)
    assert (mine[0].int() - by_block(summary).int()).abs().max() <= 1
    group = HEADS // KV_HEADS
    for row, head in product(range(blocks.budget * blocks.block, context, 29), range(KV_HEADS)):
        own = row // blocks.block
        first, last = blocks.sink, own - blocks.window + 1
        q = layer.q[row, head * group : (head + 1) * group]
        value = score_torch(q, mine[0][first:last, head], mine[1][first:last, head], DIM**-0.5)
        order = value.argsort(descending=True)[: blocks.budget - blocks.sink - blocks.window]
        wanted = {*range(first), *range(last, own + 1), *(first + int(i) for i in order)}
        got = layer.masks[row, head].tolist()
        assert got == mask_of_blocks(wanted, blocks, len(got)), (row, head)


@pytest.mark.parametrize(("blocks", "page", "context", "dtype"), CASES)
def test_bits_do_not_depend_on_how_the_prompt_was_cut(
    isa: CpuExtension, blocks: KeyBlocks, page: int, context: int, dtype: torch.dtype
) -> None:
    whole = Layer(isa, context, blocks, page, dtype).run(0, context)
    for cuts in ([0, 150, 151, 152, context], [0, 17, 129, context - 1, context]):
        layer = Layer(isa, context, blocks, page, dtype)
        parts = torch.cat([layer.run(begin, end) for begin, end in pairwise(cuts)])
        assert torch.equal(whole, parts)


def test_bits_do_not_depend_on_threads_and_company(isa: CpuExtension) -> None:
    blocks, page, context = CASES[0][:3]
    alone = Layer(isa, context, blocks, page, torch.float32).run(0, context)
    threads = isa.num_threads
    try:
        isa.set_num_threads(3)
        assert torch.equal(alone, Layer(isa, context, blocks, page, torch.float32).run(0, context))
    finally:
        isa.set_num_threads(threads)


@pytest.mark.parametrize(
    ("blocks", "page", "dtype"),
    [(KeyBlocks(16, 1, 2, 5), 16, torch.float16), (KeyBlocks(32, 0, 1, 3), 64, torch.int8)],
)
def test_one_row_in_pieces(isa: CpuExtension, blocks: KeyBlocks, page: int, dtype: torch.dtype) -> None:
    """A long context is cut for the team, and of most tiles of a piece nothing was chosen."""
    context = 2010
    layer = Layer(isa, context, blocks, page, dtype)
    layer.run(0, context - 1)
    alone = layer.run(context - 1, context)
    assert (layer.masks[0] == 0).sum() > 20
    threads = isa.num_threads
    try:
        for count in (2, 3):
            isa.set_num_threads(count)
            layer.run(context - 300, context - 1)  # leaves other states where those of the pieces will lie
            assert torch.equal(alone, layer.run(context - 1, context)), count
    finally:
        isa.set_num_threads(threads)


def test_keys_that_are_not_chosen_are_not_read(isa: CpuExtension) -> None:
    blocks, page, context = CASES[0][:3]
    layer = Layer(isa, context, blocks, page, torch.float32)
    layer.run(0, context - 1)
    out = layer.run(context - 1, context)
    for head in range(KV_HEADS):
        seen = seen_of(layer.masks, head, context)[0]
        hidden = layer.slots(0, context)[~seen]
        assert len(hidden) == context - blocks.num_read(context - 1)
        layer.k[hidden // page, head, hidden % page] = torch.nan
        layer.v[hidden // page, head, hidden % page] = torch.inf
    layer.keys, layer.values = layer.keys, layer.values
    assert torch.equal(out, layer.run(context - 1, context))


def test_a_key_that_stands_out_is_found(isa: CpuExtension) -> None:
    blocks, page, context = KeyBlocks(16, 1, 1, 3), 16, 400
    layer = Layer(isa, context, blocks, page, torch.float32)
    for head in range(KV_HEADS):
        layer.keys[123, head] = layer.q[context - 1, head * 3 : head * 3 + 3].mean(0) * 5
    layer.run(0, context)
    for head in range(KV_HEADS):
        assert seen_of(layer.masks, head, context)[-1, 123]


@pytest.mark.parametrize("fill", [torch.nan, torch.inf])
def test_queries_that_are_not_finite_choose_something(isa: CpuExtension, fill: float) -> None:
    blocks, page, context = CASES[0][:3]
    layer = Layer(isa, context, blocks, page, torch.float32)
    layer.q[-1] = fill
    layer.run(0, context)
    assert seen_of(layer.masks, 0, context)[-1].sum() == blocks.num_read(context - 1)


@pytest.mark.parametrize(
    ("numbers", "page", "words"),
    [
        ((8, 1, 1, 3), 16, "blocks of 8 keys"),
        ((32, 1, 1, 3), 16, "divides the page"),
        ((16, 1, 0, 3), 16, "budget of 3 blocks"),
        ((16, 2, 2, 3), 16, "must hold both"),
        ((16, -1, 2, 3), 16, "budget of 3"),
    ],
)
def test_numbers_that_contradict_each_other(numbers: tuple[int, int, int, int], page: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KeyBlocks(*numbers).check(page)


def test_a_window_besides_is_refused(isa: CpuExtension) -> None:
    blocks, page, context = CASES[0][:3]
    layer = Layer(isa, context, blocks, page, torch.float32)
    layer.run(0, context)
    chooses = LayerBlocks(blocks, layer.summary, layer.summary_scale)
    lengths = torch.tensor([0, 1]).int(), torch.tensor([context]).int(), layer.table
    with pytest.raises(ValueError, match="no window besides"):
        isa.paged_attention(layer.q[-1:], layer.k, layer.v, *lengths, 0.2, 50, None, None, chooses)
