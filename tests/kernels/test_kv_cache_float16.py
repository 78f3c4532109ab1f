"""float16 key-value cache: float64 attention over the rounded keys and values, on torch and on every instruction set;
rows that are bit-equal whatever shares the call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penjing.kernels.cpu import extension
from penjing.kernels.kv_cache import write_kv
from tests.kernels.paging import Cache, Sequence, dense_attention, draw

HEADS = {"mha": (4, 4), "gqa": (9, 3), "mqa": (8, 1)}


def check(sequences: list[Sequence], block_size: int, window: int | None) -> None:
    outputs = Cache(sequences, block_size, seed=1, dtype=torch.float16).attend_new(sequences, window)
    for sequence, output in zip(sequences, outputs, strict=True):
        stored = replace(sequence, k=sequence.k.half().float(), v=sequence.v.half().float())
        expected = dense_attention(stored, window)
        bound = 2 * (dense_attention(stored, window, torch.float32) - expected).abs().max() + 1e-6
        assert (output - expected).abs().max() <= bound


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


@pytest.mark.parametrize("window", [None, 70])
def test_bits_do_not_depend_on_chunks_company_blocks_or_threads(path: str, window: int | None) -> None:
    sequences = draw([(300, 300), (40, 150), (200, 260)], HEADS["gqa"], 64, seed=4)
    whole = Cache(sequences, 16, seed=5, dtype=torch.float16).attend_new(sequences, window)
    cache, first = Cache(sequences, 48, seed=6, dtype=torch.float16), sequences[0]
    kernels = extension()
    before = kernels.num_threads if kernels else 0
    try:
        for chunk, count in ((37, 1), (128, 3)):
            if kernels:
                kernels.set_num_threads(count)
            for start in range(0, first.context, chunk):
                end = min(start + chunk, first.context)
                company = [(2, sequences[2].q[-7:], sequences[2].context)] if start % 2 else []
                rows = cache.attend([*company, (0, first.q[start:end], end)], window)[-1]
                assert torch.equal(rows, whole[0][start:end])
    finally:
        if kernels:
            kernels.set_num_threads(before)
    (decode,) = cache.attend([(1, sequences[1].q[-1:], 150)], window)
    assert torch.equal(decode[0], whole[1][-1])


def test_every_half_is_stored_as_torch_rounds_it(path: str) -> None:
    """All halves, what lies halfway between two of them, and what lies beyond them, which becomes the largest."""
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16)
    halves = halves[halves.isfinite()].float()
    above = torch.nextafter(halves.half(), torch.tensor(torch.inf).half()).float()
    x = torch.cat([halves, (halves + above) / 2, torch.tensor([65519.0, 65520.0, 1e30, torch.inf, -torch.inf, 1e-30])])
    x_TKD = torch.cat([x, torch.zeros(-len(x) % 84)]).view(-1, 2, 42)
    k_cache, v_cache = (torch.full((len(x_TKD), 2, 1, 42), torch.nan).half() for _ in range(2))
    write_kv(x_TKD, -x_TKD, k_cache, v_cache, torch.arange(len(x_TKD)))
    expected = x_TKD.clamp(-65504, 65504).half()
    assert torch.equal(k_cache[:, :, 0], expected)
    assert torch.equal(v_cache[:, :, 0], -expected)
    assert k_cache.isfinite().all()


def test_damage_stays_visible(path: str) -> None:
    (sequence,) = draw([(1, 20)], (2, 1), 8, seed=10)
    sequence.k[7, 0, 3] = torch.nan
    (out,) = Cache([sequence], 16, seed=1, dtype=torch.float16).attend_new([sequence], None)
    assert out.isnan().any()
