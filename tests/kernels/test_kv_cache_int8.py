"""INT8 key-value cache: float64 attention over the dequantized keys and values, on torch and on every instruction set;
rows that are bit-equal whatever shares the call; what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import ISAS
from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention
from tests.kernels.cpu import needs_extension, the_extension
from tests.kernels.paging import Cache, Sequence, dense_attention, draw

HEADS = {"mha": (4, 4), "gqa": (9, 3), "mqa": (8, 1)}
# C++ rounds queries to 16 bits: scores of normal draws are off by some 3e-5, at most 1e-4 in the outputs seen.
QUERY_ROUNDING = 3e-4


def rounded(x: Tensor) -> Tensor:
    """Each row as INT8 holds it: amax / 127, half to even."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale[scale == 0] = 1
    return torch.round(x / scale).clamp(-127, 127) * scale


def check(path: str, sequences: list[Sequence], block_size: int, window: int | None) -> None:
    outputs = Cache(sequences, block_size, seed=1, dtype=torch.int8).attend_new(sequences, window)
    for sequence, output in zip(sequences, outputs, strict=True):
        stored = replace(sequence, k=rounded(sequence.k), v=rounded(sequence.v))
        expected = dense_attention(stored, window)
        same_type = dense_attention(stored, window, torch.float32)
        bound = 2 * (same_type - expected).abs().max() + (1e-6 if path == "torch" else QUERY_ROUNDING)
        assert (output - expected).abs().max() <= bound


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("new", "context"), [(1, 1), (239, 239), (1, 799), (113, 203), (64, 128)])
@pytest.mark.parametrize("window", [None, 50])
def test_one_sequence(path: str, heads: tuple[int, int], new: int, context: int, window: int | None) -> None:
    check(path, draw([(new, context)], heads, 32), 16, window)


@pytest.mark.parametrize(
    ("block_size", "head_dim"), [(1, 64), (16, 4), (16, 80), (16, 100), (16, 512), (24, 64), (100, 128), (512, 36)]
)
def test_mixed_batch(path: str, block_size: int, head_dim: int) -> None:
    lengths = [(1, 328), (5, 18), (69, 163), (1, 1), (7, 7), (16, 128), (1, 129)]
    check(path, draw(lengths, (6, 2), head_dim, seed=2), block_size, None)


@pytest.mark.parametrize("window", [1, 15, 63, 64, 65, 127, 400])
def test_windows(path: str, window: int) -> None:
    check(path, draw([(1, 300), (77, 200), (100, 100), (3, 20)], (4, 2), 16, seed=3), 32, window)


@pytest.mark.parametrize("window", [None, 70])
def test_bits_do_not_depend_on_chunks_company_blocks_or_threads(path: str, window: int | None) -> None:
    sequences = draw([(300, 300), (40, 150), (200, 260)], HEADS["gqa"], 64, seed=4)
    whole = Cache(sequences, 16, seed=5, dtype=torch.int8).attend_new(sequences, window)
    cache, first = Cache(sequences, 48, seed=6, dtype=torch.int8), sequences[0]
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


def test_a_token_is_stored_the_same_everywhere(path: str) -> None:
    """Bytes and scales are those of the formula, whatever else is written; rows of zeros have scale 1."""
    generator = torch.Generator().manual_seed(7)
    k, v = torch.randn(2, 9, 2, 36, generator=generator)
    k[3, 1], v[4] = 0, v[4] * 1e-30
    k_cache, v_cache = (torch.full((3, 2, 4, 36), 9, dtype=torch.int8) for _ in range(2))
    k_scale, v_scale = torch.full((3, 2, 4), torch.nan), torch.full((3, 2, 4), torch.nan)
    slots = torch.tensor([3, 7, -1, 0, 11, 10, 5, 4, 1])
    write_kv(k, v, k_cache, v_cache, slots, k_scale, v_scale)
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            expected = x[token].abs().amax(-1) / 127
            expected[expected == 0] = 1
            assert torch.equal(scale[slot // 4, :, slot % 4], expected)
            q = torch.round(x[token] / expected[:, None]).clamp(-127, 127)
            assert torch.equal(cache[slot // 4, :, slot % 4], q.to(torch.int8))
        untouched = [2, 6, 8, 9]
        assert scale.transpose(1, 2).flatten(0, 1)[untouched].isnan().all()
        assert (cache.transpose(1, 2).flatten(0, 1)[untouched] == 9).all()


@needs_extension
def test_instruction_sets_agree_on_the_scores() -> None:
    """Scores are exact sums of integers, so that only the softmax's rounding differs."""
    sequences = draw([(1, 700), (90, 90)], HEADS["gqa"], 64, seed=8)
    outputs = []
    kernels, before = the_extension(), the_extension().isa
    for name in ISAS:
        try:
            kernels.select_isa(name)
        except ValueError:
            continue
        outputs.append(torch.cat(Cache(sequences, 16, seed=9, dtype=torch.int8).attend_new(sequences, None)))
    kernels.select_isa(before)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=2e-6)


def test_extreme_heads_do_not_overflow(path: str) -> None:
    # Every product at its limit: 32767 × 127 × 512 is just below 2³¹.
    k_cache = torch.full((1, 1, 4, 512), 127, dtype=torch.int8)
    scales = torch.full((1, 1, 4), 0.5), torch.ones(1, 1, 4)
    out = paged_attention(
        torch.full((1, 1, 512), 3.0), k_cache, -k_cache, *lengths(1, 4), torch.tensor([[0]]).int(), 1e-4, None, *scales
    )
    torch.testing.assert_close(out, torch.full((1, 1, 512), -127.0), rtol=1e-5, atol=0)


def test_damage_stays_visible(path: str) -> None:
    (sequence,) = draw([(1, 20)], (2, 1), 8, seed=10)
    sequence.k[7, 0, 3] = torch.nan
    (out,) = Cache([sequence], 16, seed=1, dtype=torch.int8).attend_new([sequence], None)
    assert not out.isfinite().any()


def test_damage_ends_with_its_call(path: str) -> None:
    """The next call's tile has fewer keys: what the last one left behind them in working memory is not read."""
    short, long = draw([(1, 20), (1, 64)], (2, 1), 8, seed=11)
    long.k[20:], long.v[20:] = torch.nan, torch.nan
    cache = Cache([short, long], 16, seed=1, dtype=torch.int8)
    expected = cache.attend_new([short, long], None, [0])[0]
    assert expected.isfinite().all()
    for _ in range(2):  # two sets of rows are used in turn
        assert not cache.attend_new([short, long], None, [1])[0].isfinite().any()
        assert torch.equal(cache.attend_new([short, long], None, [0])[0], expected)


def lengths(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([0, queries], dtype=torch.int32), torch.tensor([keys], dtype=torch.int32)


PAGES, SCALES = torch.ones(3, 2, 4, 8, dtype=torch.int8), torch.ones(3, 2, 4)
REFUSED = {
    "no scales": ({"k_scale": None, "v_scale": None}, "int8 cache without k_scale"),
    "one scale": ({"v_scale": None}, "int8 cache without v_scale"),
    "shape of scales": ({"k_scale": torch.ones(3, 4, 2)}, r"k_scale has shape \(3, 4, 2\)"),
    "a scale a block": ({"v_scale": torch.ones(3, 2, 1)}, "v_scale has shape"),
    "dtype of scales": ({"v_scale": SCALES.half()}, "v_scale.*float16"),
    "strides of scales": ({"k_scale": torch.ones(3, 2, 8)[:, :, ::2]}, "k_scale.*strides"),
    "scales of floats": ({"k_cache": PAGES.float(), "v_cache": PAGES.float()}, "belong to an int8 cache"),
    "mixed": ({"k_cache": PAGES.float()}, "of one dtype"),
    "other integers": ({"k_cache": PAGES.int(), "v_cache": PAGES.int()}, "floating type, or int8"),
    "head_dim 6": ({"k_cache": PAGES[..., :6].clone(), "v_cache": PAGES[..., :6].clone()}, "head_dim=6"),
    "head_dim 516": ({name: torch.ones(3, 2, 4, 516, dtype=torch.int8) for name in ("k_cache", "v_cache")}, "512"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_refuses_a_cache(path: str, change: dict[str, Tensor | None], message: str) -> None:
    cache = {"k_cache": PAGES, "v_cache": PAGES, "k_scale": SCALES, "v_scale": SCALES}
    table = torch.tensor([[0, 2]], dtype=torch.int32)
    call = {"scale": 1.0, "window": None, "cu_query_S1": lengths(1, 5)[0], "context_len_S": lengths(1, 5)[1]}
    attend = {"q_THD": torch.ones(1, 4, 8), "block_table_SB": table, **call}
    assert paged_attention(**attend | cache).eq(1).all()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=message):
        paged_attention(**attend | cache | change)  # pyright: ignore[reportArgumentType]
    k = torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=message):
        write_kv(k_TKD=k, v_TKD=k, slot_T=torch.tensor([0]), **cache | change)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("block", "keys", "message"), [(3, 5, "block table"), (-1, 5, "block table"), (1, 0, "keys")])
def test_refuses_a_batch(path: str, block: int, keys: int, message: str) -> None:
    table = torch.tensor([[0, block]], dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        paged_attention(
            torch.ones(1, 4, 8), PAGES, PAGES, *lengths(1, keys), table, 1.0, None, SCALES.clone(), SCALES.clone()
        )


def test_an_empty_batch_and_nothing_to_write(path: str) -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    out = paged_attention(
        torch.empty(0, 4, 8), PAGES, PAGES, nothing.new_zeros(1), nothing, nothing.view(0, 1), 1.0, None, SCALES, SCALES
    )
    assert out.shape == (0, 4, 8)
    pages, scales = PAGES.clone(), SCALES.clone()
    write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), pages, pages, torch.tensor([-1, -1]), scales, scales)
    assert torch.equal(pages, PAGES)
    with pytest.raises(ValueError, match="outside the cache"):
        write_kv(torch.ones(1, 2, 8), torch.ones(1, 2, 8), pages, pages, torch.tensor([12]), scales, scales)
    with pytest.raises(ValueError, match="floating"):
        write_kv(PAGES[:1, :, 0], PAGES[:1, :, 0], pages, pages, torch.tensor([0]), scales, scales)
