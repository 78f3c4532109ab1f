"""Paged attention: float64 attention over the same keys, and rows that are bit-equal whatever shares the call."""

import pytest
import torch
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.kv_cache import write_kv
from penjing.kernels.paged_attention import paged_attention
from tests.kernels.paging import Cache, Sequence, dense_attention, draw_sequence

pytestmark = pytest.mark.usefixtures("implementation")
HEADS = {"mha": (4, 4), "gqa": (9, 3), "mqa": (8, 1)}


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def draw(lengths: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, seed: int = 0) -> list[Sequence]:
    """Sequences of (new tokens, context)."""
    return [
        draw_sequence(context, new, *heads, head_dim, seed=seed * 1009 + index)
        for index, (new, context) in enumerate(lengths)
    ]


def check_against_float64(sequences: list[Sequence], outputs: list[Tensor], window: int | None) -> None:
    for sequence, output in zip(sequences, outputs, strict=True):
        expected = dense_attention(sequence, window)
        same_type = dense_attention(sequence, window, torch.float32)
        assert output.dtype == torch.float32
        assert (output - expected).abs().max() <= 2 * (same_type - expected).abs().max() + 1e-6


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("new", "context"), [(1, 1), (239, 239), (1, 799), (113, 203), (129, 463), (18, 1023)])
@pytest.mark.parametrize("window", [None, 50])
def test_one_sequence(heads: tuple[int, int], new: int, context: int, window: int | None) -> None:
    sequences = draw([(new, context)], heads, 32)
    check_against_float64(sequences, Cache(sequences, 16, seed=1).attend_new(sequences, window), window)


@pytest.mark.parametrize("block_size", [16, 32, 48, 100, 128, 256, 512])
@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_mixed_batch(block_size: int, head_dim: int) -> None:
    sequences = draw([(1, 328), (5, 18), (129, 463), (1, 1), (7, 7), (16, 128), (1, 129)], (6, 2), head_dim, seed=2)
    check_against_float64(sequences, Cache(sequences, block_size, seed=2).attend_new(sequences, None), None)


def test_a_query_tile_that_straddles_key_tiles_beside_a_later_start() -> None:
    # 3 heads a group make query tiles of 5: rows 125 … 129 see part of the keys 0 … 127, the single row 128 all.
    sequences = draw([(5, 130), (1, 129), (2, 130), (4, 129)], HEADS["gqa"], 16, seed=20)
    check_against_float64(sequences, Cache(sequences, 16, seed=20).attend_new(sequences, None), None)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 127, 128, 129, 400, 1000])
def test_windows(window: int) -> None:
    sequences = draw([(1, 500), (77, 300), (200, 200), (3, 20)], (4, 2), 16, seed=3)
    check_against_float64(sequences, Cache(sequences, 32, seed=3).attend_new(sequences, window), window)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("block_size", [16, 512])
def test_alone_equals_in_a_batch_of_32(heads: tuple[int, int], window: int | None, block_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    contexts = torch.randint(1, 300, (32,), generator=generator).tolist()
    sequences = draw([(1 if i % 4 else min(c, 40), c) for i, c in enumerate(contexts)], heads, 32, seed=4)
    cache = Cache(sequences, block_size, seed=4)
    together = cache.attend_new(sequences, window)
    for row in range(32):
        assert torch.equal(cache.attend_new(sequences, window, [row])[0], together[row])
    order = torch.randperm(32, generator=generator).tolist()
    for row, output in zip(order, cache.attend_new(sequences, window, order), strict=True):
        assert torch.equal(output, together[row])


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 50, 128, 200])
def test_any_chunking_gives_the_same_bits(heads: tuple[int, int], window: int | None, chunk: int) -> None:
    context = 150 if chunk == 1 else 299
    sequences = draw([(context, context), (1, 77)], heads, 16, seed=5)
    cache = Cache(sequences, 16, seed=5)
    whole = cache.attend_new(sequences, window, [0])[0]
    q = sequences[0].q
    for start in range(0, context, chunk):
        end = min(start + chunk, context)
        # Later keys are in the cache already, as after a preemption; another sequence decodes in the same call.
        part, _ = cache.attend([(0, q[start:end], end), (1, sequences[1].q[-1:], 77)], window)
        assert torch.equal(part, whole[start:end])


@pytest.mark.parametrize("window", [None, 60])
def test_block_ids_and_sizes_do_not_matter(window: int | None) -> None:
    sequences = draw([(1, 290), (33, 200), (150, 150)], (6, 2), 24, seed=6)
    expected = Cache(sequences, 16, seed=6).attend_new(sequences, window)
    for block_size, seed in ((16, 7), (16, 8), (32, 7), (48, 9), (128, 7), (512, 7)):
        actual = Cache(sequences, block_size, seed=seed, spare_blocks=50).attend_new(sequences, window)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_blocks_before_the_window_are_not_read() -> None:
    sequences = draw([(1, 200)], (4, 2), 16, seed=10)
    cache = Cache(sequences, 16, seed=10)
    expected = cache.attend_new(sequences, 30)[0]
    cache.table[0, : (200 - 30) // 16] = -1
    assert torch.equal(cache.attend_new(sequences, 30)[0], expected)
    with pytest.raises(ValueError, match="the block table holds"):
        cache.attend_new(sequences, None)


def test_page_offsets_beyond_32_bits() -> None:
    # 32 768 blocks × 512 tokens × 130 dimensions: offsets beyond 2^31. Keys and values share one cache, and one page of
    # it is touched: the rest of the 8.1 GiB stays virtual.
    cache = torch.empty(32768, 1, 512, 130)
    block = 32767
    assert block * 512 * 130 > 2**31
    sequence = draw([(1, 100)], (2, 1), 130, seed=11)[0]
    sequence.v = sequence.k
    write_kv(sequence.k, sequence.v, cache, cache, block * 512 + torch.arange(100))
    out = paged_attention(sequence.q[-1:], cache, cache, int32(0, 1), int32(100), int32(block)[:, None], 130**-0.5)
    check_against_float64([sequence], [out], None)


def test_half_precision_cache() -> None:
    sequences = draw([(5, 90)], (4, 2), 32, seed=12)
    for sequence in sequences:
        sequence.k, sequence.v = sequence.k.half().float(), sequence.v.half().float()
    cache = Cache(sequences, 16, seed=12)
    cache.k, cache.v = cache.k.half(), cache.v.half()
    check_against_float64(sequences, cache.attend_new(sequences, None), None)


def test_the_default_path_agrees_with_torch() -> None:
    sequences = draw([(1, 328), (40, 60), (1, 7)], (9, 3), 64, seed=13)
    cache = Cache(sequences, 16, seed=13)
    actual = cache.attend_new(sequences, None)
    with force_torch():
        expected = cache.attend_new(sequences, None)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_sequence_without_queries_and_an_empty_batch() -> None:
    sequences = draw([(1, 20), (0, 30), (2, 9)], (4, 2), 8, seed=14)
    cache = Cache(sequences, 16, seed=14)
    outputs = cache.attend_new(sequences, None)
    assert outputs[1].shape == (0, 4, 8)
    assert torch.equal(outputs[2], cache.attend_new(sequences, None, [2])[0])
    empty = paged_attention(
        torch.empty(0, 4, 8),
        cache.k,
        cache.v,
        torch.zeros(1, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        torch.empty(0, 1, dtype=torch.int32),
        1.0,
    )
    assert empty.shape == (0, 4, 8)


def test_write_skips_minus_one_and_touches_nothing_else() -> None:
    k_cache, v_cache = torch.zeros(5, 2, 16, 4), torch.zeros(5, 2, 16, 4)
    k, v = torch.randn(2, 4, 2, 4, generator=torch.Generator().manual_seed(15))
    write_kv(k, v, k_cache, v_cache, torch.tensor([3 * 16 + 5, -1, 0, 79]))
    for token, (block, offset) in {0: (3, 5), 2: (0, 0), 3: (4, 15)}.items():
        assert torch.equal(k_cache[block, :, offset], k[token])
        assert torch.equal(v_cache[block, :, offset], v[token])
    assert k_cache.count_nonzero() == v_cache.count_nonzero() == 3 * 8
    write_kv(k[:0], v[:0], k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    assert k_cache.count_nonzero() == 3 * 8


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (torch.tensor([0, 32]), "outside the cache"),
        (torch.tensor([-2, 0]), "outside the cache"),
        (torch.tensor([0, 1], dtype=torch.int32), "int64"),
        (torch.tensor([0]), "k has shape"),
    ],
)
def test_write_refuses(slots: Tensor, message: str) -> None:
    cache = torch.zeros(2, 1, 16, 4)
    with pytest.raises(ValueError, match=message):
        write_kv(torch.ones(2, 1, 4), torch.ones(2, 1, 4), cache, cache.clone(), slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_THD": torch.ones(3, 5, 8)}, "multiple of 2"),
        ({"q_THD": torch.ones(3, 4, 6)}, "num_heads, 8"),
        ({"k_cache": torch.ones(4, 2, 8, 16).transpose(2, 3)}, "contiguous"),
        ({"v_cache": torch.ones(4, 2, 16, 4)}, "v_cache"),
        ({"cu_query_S1": int32(0, 1)}, "cu_query_S1"),
        ({"cu_query_S1": torch.tensor([0, 1, 3])}, "int32"),
        ({"cu_query_S1": int32(0, 1, 2)}, "T = 3"),
        ({"cu_query_S1": int32(1, 1, 3)}, "cu_query runs from 1"),
        ({"cu_query_S1": int32(0, 5, 3)}, "sequence 1 has -2 queries"),
        ({"context_len_S": int32(0, 9)}, "sequence 0 has 1 queries and 0 keys"),
        ({"context_len_S": int32(33, 9)}, "keys ≤ 32"),
        ({"block_table_SB": int32(0, 1)}, "block_table_SB"),
        ({"block_table_SB": torch.tensor([[0, 4], [1, 2]], dtype=torch.int32)}, "the block table holds"),
        ({"block_table_SB": torch.tensor([[0, -7], [1, 2]], dtype=torch.int32)}, "the block table holds"),
        ({"window": 0}, "window=0"),
    ],
)
def test_attention_refuses(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "q_THD": torch.ones(3, 4, 8),
        "k_cache": torch.ones(4, 2, 16, 8),
        "v_cache": torch.ones(4, 2, 16, 8),
        "cu_query_S1": int32(0, 1, 3),
        "context_len_S": int32(20, 9),
        "block_table_SB": torch.tensor([[0, 3], [1, 2]], dtype=torch.int32),
        "scale": 1.0,
        "window": None,
    }
    assert paged_attention(**arguments).eq(1).all()  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=message):
        paged_attention(**arguments | change)  # pyright: ignore[reportArgumentType]
