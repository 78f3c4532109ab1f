"""bfloat16 key-value cache: attention in which queries and weights are bfloat16 too, beside float64; one result on all
instruction sets with AVX-512, by tiles or not; rows that are bit-equal whatever shares the call."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.kv_cache import write_kv
from tests.kernels.cpu import needs_extension, the_extension
from tests.kernels.paging import Cache, Sequence, dense_attention, draw
from tests.kernels.test_turned_pages import Pages

HEADS = {"mha": (4, 4), "gqa": (9, 3), "mqa": (8, 1)}
ROUNDING = 2.0**-8  # of a weight that is rounded, and of the scores that a rounded query makes


def check(sequences: list[Sequence], block_size: int, window: int | None) -> None:
    outputs = Cache(sequences, block_size, seed=1, dtype=torch.bfloat16).attend_new(sequences, window)
    for sequence, output in zip(sequences, outputs, strict=True):
        stored = replace(sequence, k=sequence.k.bfloat16().float(), v=sequence.v.bfloat16().float())
        expected = dense_attention(stored, window)
        assert (output - expected).abs().max() <= ROUNDING * stored.v.abs().max()
        assert (output - expected).abs().mean() <= ROUNDING / 4


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 799), (113, 203), (64, 128)])
@pytest.mark.parametrize("window", [None, 50])
def test_one_sequence(path: str, heads: tuple[int, int], new: int, context: int, window: int | None) -> None:
    check(draw([(new, context)], heads, 32), 16, window)


@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(1, 64), (16, 2), (16, 66), (24, 100), (100, 128), (512, 36), (16, 256)]
)
def test_mixed_batch(path: str, block_size: int, head_dim: int) -> None:
    lengths = [(1, 328), (5, 18), (69, 163), (1, 1), (7, 7), (16, 128), (1, 129)]
    check(draw(lengths, (6, 2), head_dim, seed=2), block_size, None)


@pytest.fixture
def levels() -> list[str]:
    """Instruction sets of sixteen lanes that run here: sums over lanes have another order on others."""
    kernels, before, found = the_extension(), the_extension().isa, []
    for name in ("avx512_vnni", "avx512_bf16", "amx"):
        try:
            kernels.select_isa(name)
        except ValueError:
            continue
        found.append(name)
    kernels.select_isa(before)
    if not found:
        pytest.skip("no AVX-512 here")
    return found


@needs_extension
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 99))
def test_tiles_and_vectors_give_the_same_bits(levels: list[str], data: st.DataObject, seed: int) -> None:
    """Rows alone and together, so that the same rows go by tiles and by vectors."""
    torch.manual_seed(seed)
    kernels, before = the_extension(), the_extension().isa
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 9))
    head_dim = data.draw(st.sampled_from((32, 64, 96, 128, 20, 80)))
    context = data.draw(st.integers(1, 260))
    length = data.draw(st.integers(1, context))
    window, cap = data.draw(st.sampled_from((None, 1, 13, 70))), data.draw(st.sampled_from((None, 2.0)))
    turned = data.draw(st.booleans())
    size = data.draw(st.sampled_from((1.0, 1e-18, 1e-37)))  # of keys and values: some of the last would be subnormal
    pages = Pages(kernels, torch.bfloat16, [context], 16, kv_heads, head_dim, size)
    q = torch.randn(length, kv_heads * group, head_dim) * data.draw(st.sampled_from((1.0, 30.0, 1e-18, 1e37)))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=3))})
    results = []
    try:
        for level in levels:
            kernels.select_isa(level)
            pages.contexts = [context]
            results.append(pages.attend(kernels, turned, q, [length], window, cap))
            parts = []
            for begin, end in pairwise(cuts):
                pages.contexts = [context - length + end]
                parts.append(pages.attend(kernels, turned, q[begin:end], [end - begin], window, cap))
            results.append(torch.cat(parts))
    finally:
        kernels.select_isa(before)
    assert results[0].isfinite().all()
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_every_number_is_stored_as_torch_rounds_it(path: str) -> None:
    """All numbers, what lies halfway between two of them, and what lies beyond; what is below 2^-56 becomes 0."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()].float()
    above = torch.nextafter(numbers.bfloat16(), torch.tensor(torch.inf).bfloat16()).float()
    x = torch.cat([numbers, (numbers + above) / 2, torch.tensor([3.4e38, -3.4e38, torch.inf, -torch.inf])])
    x = x.nan_to_num(posinf=torch.inf, neginf=-torch.inf)
    x_TKD = torch.cat([x, torch.zeros(-len(x) % 84)]).view(-1, 2, 42)
    k_cache, v_cache = (torch.full((len(x_TKD), 2, 1, 42), torch.nan).bfloat16() for _ in range(2))
    write_kv(x_TKD, -x_TKD, k_cache, v_cache, torch.arange(len(x_TKD)))
    expected = x_TKD.bfloat16()
    if path != "torch":
        expected = torch.where(x_TKD.abs() < 2.0**-56, 0.0, expected)
    assert torch.equal(k_cache[:, :, 0], expected)
    assert torch.equal(v_cache[:, :, 0], -expected)


def test_damage_stays_visible(path: str) -> None:
    (sequence,) = draw([(1, 20)], (2, 1), 8, seed=10)
    sequence.k[7, 0, 3] = torch.nan
    (out,) = Cache([sequence], 16, seed=1, dtype=torch.bfloat16).attend_new([sequence], None)
    assert out.isnan().any()


@needs_extension
def test_damage_of_one_row_is_not_that_of_its_neighbours(isa: CpuExtension) -> None:
    torch.manual_seed(0)
    pages = Pages(isa, torch.bfloat16, [40], 16, 1, 64)
    q = torch.randn(20, 4, 64)
    whole = pages.attend(isa, True, q, [20], None, None)
    damaged: Tensor = q.clone()
    damaged[3] = torch.nan
    out = pages.attend(isa, True, damaged, [20], None, None)
    assert out[3].isnan().all()
    assert torch.equal(torch.cat([out[:3], out[4:]]), torch.cat([whole[:3], whole[4:]]))
