"""Pages whose keys lie by dimension: what they hold, and what attention makes of them, beside pages by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.cpu.key_blocks import KeyBlocks
from tests.kernels.choosing import Layer
from tests.kernels.cpu import by_token, needs_extension, the_extension
from tests.kernels.test_decoder_step import KV_HEADS, LAYERS, draw_ids, inputs, make_step

pytestmark = needs_extension
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


class Pages:
    """The same random keys and values in pages that lie by token and in turned ones; the rest of them is NaN, or 77."""

    def __init__(
        self,
        kernels: CpuExtension,
        dtype: torch.dtype,
        contexts: list[int],
        page: int,
        kv_heads: int,
        head_dim: int,
        size: float = 1.0,
    ):
        blocks = [-(-context // page) for context in contexts]
        order = torch.randperm(sum(blocks) + 2)[: sum(blocks)]
        rows = order.split(blocks)
        self.table = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-1).int()
        slots = torch.cat(
            [
                row[torch.arange(context) // page] * page + torch.arange(context) % page
                for row, context in zip(rows, contexts, strict=True)
            ]
        )
        keys, values = (torch.randn(len(slots), kv_heads, head_dim) * size for _ in range(2))
        self.contexts, self.caches = contexts, {}
        for turned in (False, True):
            shape = (sum(blocks) + 2, kv_heads, page, head_dim)
            k, v = (torch.full(shape, 77 if dtype == torch.int8 else torch.nan, dtype=dtype) for _ in range(2))
            scales = [torch.full(shape[:3], torch.nan) if dtype == torch.int8 else None for _ in range(2)]
            kernels.write_kv(keys, values, k, v, slots, *scales, turned=turned)
            self.caches[turned] = (k, v, *scales)

    def attend(
        self, kernels: CpuExtension, turned: bool, q: Tensor, lengths: list[int], window: int | None, cap: float | None
    ) -> Tensor:
        k, v, k_scale, v_scale = self.caches[turned]
        sequences = torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor(self.contexts).int(), self.table
        scale = q.shape[-1] ** -0.5
        return kernels.paged_attention(q, k, v, *sequences, scale, window, k_scale, v_scale, cap=cap, turned=turned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turned_pages_hold_the_same_keys_in_another_order(isa: CpuExtension, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    pages = Pages(isa, dtype, [70, 5], 32, 2, 20)
    plain, turned = pages.caches[False], pages.caches[True]
    assert not torch.equal(turned[0].nan_to_num(), plain[0].nan_to_num())
    for mine, other in zip((by_token(turned[0]), *turned[1:]), plain, strict=True):
        torch.testing.assert_close(mine, other, atol=0, rtol=0, equal_nan=True)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_attention_gives_the_same_bits(isa: CpuExtension, data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    page = data.draw(st.sampled_from((16, 32, 48, 64)))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    head_dim = data.draw(st.sampled_from((4, 20, 64, 72) if dtype == torch.int8 else (5, 20, 32, 64, 72, 96, 520)))
    contexts = data.draw(st.lists(st.integers(1, 200), min_size=1, max_size=4))
    lengths = [data.draw(st.sampled_from((1, 1, 2, context // 2, context))) for context in contexts]
    lengths = [max(1, min(length, context)) for length, context in zip(lengths, contexts, strict=True)]
    window, cap = data.draw(st.sampled_from((None, 1, 13, 70))), data.draw(st.sampled_from((None, 2.0)))
    pages = Pages(isa, dtype, contexts, page, kv_heads, head_dim)
    q = torch.randn(sum(lengths), kv_heads * group, head_dim)
    plain, turned = (pages.attend(isa, which, q, lengths, window, cap) for which in (False, True))
    assert plain.isfinite().all()
    assert torch.equal(plain, turned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [KeyBlocks(16, 1, 2, 5), KeyBlocks(32, 0, 1, 3)], ids=lambda b: str(b.block))
def test_chosen_blocks_are_the_same(isa: CpuExtension, blocks: KeyBlocks, dtype: torch.dtype) -> None:
    plain, turned = (Layer(isa, 330, blocks, 64, dtype, turned=which) for which in (False, True))
    for begin, end in ((0, 200), (200, 201), (201, 330)):
        assert torch.equal(plain.run(begin, end), turned.run(begin, end))
        assert torch.equal(plain.masks, turned.masks)
    assert torch.equal(plain.summary, turned.summary)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", [True, False], ids=["int8 weights", "float weights"])
def test_a_step_with_pages_that_can_be_turned_gives_the_same_bits(
    isa: CpuExtension, int8: bool, dtype: torch.dtype
) -> None:
    """Pages of 16 are turned, those of 4 are not; some layers have windows."""
    step, ids = make_step(int8), draw_ids(100)

    def run(page: int, chunk: int) -> Tensor:
        shape = (LAYERS, 2, 30, KV_HEADS, page, 8)
        pool: dict[str, Any] = {"kv_pool": torch.full(shape, 77 if dtype == torch.int8 else torch.nan, dtype=dtype)}
        if dtype == torch.int8:
            pool["kv_scale"] = torch.full(shape[:-1], torch.nan)
        blocks = torch.randperm(30).tolist()[: -(-100 // page)]
        parts = ([(ids[start : start + chunk], start, blocks)] for start in range(0, 100, chunk))
        return torch.cat([step.step(**inputs(part, pool["kv_pool"]) | pool).clone() for part in parts])

    whole = run(4, 100)
    assert whole.isfinite().all()
    for page, chunk in ((16, 100), (16, 7), (32, 1)):
        assert torch.equal(run(page, chunk), whole)


def test_pages_that_cannot_be_turned_are_refused() -> None:
    cache = torch.zeros(2, 1, 24, 8)
    with pytest.raises(ValueError, match="pages of 24 keys cannot be turned; a multiple of 16 is needed"):
        the_extension().write_kv(cache[0, :, :1], cache[0, :, :1], cache, cache.clone(), torch.tensor([0]), turned=True)
