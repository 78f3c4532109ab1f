"""C++ paged attention on every instruction set: float64 attention, and bits that depend on the row alone."""

import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from tests.kernels.cpu import needs_extension, the_extension
from tests.kernels.paging import Sequence, dense_attention, draw, draw_sequence

pytestmark = needs_extension

HEADS = {"mha": (4, 4), "gqa": (9, 3), "mqa": (8, 1)}


class Cache:
    """Sequences written by the C++ kernel to blocks drawn at random; other memory is NaN and other table entries −1."""

    def __init__(self, kernels: CpuExtension, sequences: list[Sequence], block_size: int, seed: int):
        _, kv_heads, head_dim = sequences[0].k.shape
        needed = [-(-s.context // block_size) for s in sequences]
        self.kernels, self.block_size = kernels, block_size
        self.k = torch.full((sum(needed) + 3, kv_heads, block_size, head_dim), torch.nan)
        self.v = torch.full_like(self.k, torch.nan)
        free = torch.randperm(len(self.k), generator=torch.Generator().manual_seed(seed)).tolist()
        self.table = torch.full((len(sequences), max(needed) + 1), -1, dtype=torch.int32)
        for row, (sequence, count) in enumerate(zip(sequences, needed, strict=True)):
            self.table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
            position = torch.arange(sequence.context)
            slots = self.table[row].long()[position // block_size] * block_size + position % block_size
            kernels.write_kv(sequence.k, sequence.v, self.k, self.v, slots)

    def attend(self, parts: list[tuple[int, Tensor, int]], window: int | None) -> list[Tensor]:
        """One call for (row of the table, new queries, keys so far) of each part."""
        lengths = torch.tensor([0] + [len(q) for _, q, _ in parts])
        out = self.kernels.paged_attention(
            torch.cat([q for _, q, _ in parts]),
            self.k,
            self.v,
            lengths.cumsum(0).int(),
            torch.tensor([context for _, _, context in parts], dtype=torch.int32),
            self.table[[row for row, _, _ in parts]],
            self.k.shape[3] ** -0.5,
            window,
        )
        return list(out.split(lengths[1:].tolist()))


def new_parts(sequences: list[Sequence]) -> list[tuple[int, Tensor, int]]:
    return [(row, s.q[s.context - s.num_queries :], s.context) for row, s in enumerate(sequences)]


def check(kernels: CpuExtension, sequences: list[Sequence], block_size: int, window: int | None) -> None:
    outputs = Cache(kernels, sequences, block_size, seed=1).attend(new_parts(sequences), window)
    for sequence, output in zip(sequences, outputs, strict=True):
        expected = dense_attention(sequence, window)
        bound = 2 * (dense_attention(sequence, window, torch.float32) - expected).abs().max() + 1e-6
        assert (output - expected).abs().max() <= bound


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(("new", "context"), [(1, 1), (239, 239), (1, 799), (113, 203), (64, 64), (65, 128)])
@pytest.mark.parametrize("window", [None, 50])
def test_one_sequence(isa: CpuExtension, heads: tuple[int, int], new: int, context: int, window: int | None) -> None:
    check(isa, draw([(new, context)], heads, 32), 16, window)


@pytest.mark.parametrize("block_size", [1, 16, 24, 64, 100, 512])
@pytest.mark.parametrize("head_dim", [2, 66, 128])
def test_mixed_batch(isa: CpuExtension, block_size: int, head_dim: int) -> None:
    lengths = [(1, 328), (5, 18), (69, 163), (1, 1), (7, 7), (16, 128), (1, 129)]
    check(isa, draw(lengths, (6, 2), head_dim, seed=2), block_size, None)


@pytest.mark.parametrize("window", [1, 15, 63, 64, 65, 127, 400])
def test_windows(isa: CpuExtension, window: int) -> None:
    check(isa, draw([(1, 300), (77, 200), (100, 100), (3, 20)], (4, 2), 16, seed=3), 32, window)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rows_do_not_depend_on_company(
    isa: CpuExtension, threads: CpuExtension, window: int | None, count: int
) -> None:
    sequences = draw([(300, 300), (40, 150), (200, 260)], HEADS["gqa"], 64, seed=4)
    whole = Cache(isa, sequences, 16, seed=5).attend(new_parts(sequences), window)
    threads.set_num_threads(count)
    first, cache = sequences[0], Cache(isa, sequences, 48, seed=6)
    for chunk in (1, 37, 128):
        rows = []
        for start in range(0, first.context, chunk):
            if chunk == 1 and start % 23:
                continue
            end = min(start + chunk, first.context)
            company = [(2, sequences[2].q[-7:], sequences[2].context)] if start % 2 else []
            rows.append((start, end, cache.attend([*company, (0, first.q[start:end], end)], window)[-1]))
        for start, end, rows_of_chunk in rows:
            assert torch.equal(rows_of_chunk, whole[0][start:end])


def test_one_long_sequence_on_many_threads(isa: CpuExtension, threads: CpuExtension) -> None:
    (sequence,) = sequences = draw([(1, 1500)], HEADS["mqa"], 16, seed=7)
    threads.set_num_threads(1)
    (alone,) = Cache(isa, sequences, 16, seed=8).attend([(0, sequence.q[-1:], 1500)], None)
    threads.set_num_threads(6)
    (shared,) = Cache(isa, sequences, 16, seed=9).attend([(0, sequence.q[-1:], 1500)], None)
    assert torch.equal(alone, shared)


def test_extreme_scores(isa: CpuExtension) -> None:
    # Weights that underflow to zero in one tile and not in the next, and peaks that rise and fall.
    (sequence,) = draw([(200, 200)], (2, 1), 16, seed=10)
    sequence.q *= 60
    sequence.k[::7] *= 5
    (out,) = Cache(isa, [sequence], 16, seed=11).attend(new_parts([sequence]), None)
    expected = dense_attention(sequence, None)
    assert (out - expected).abs().max() <= 2 * (
        dense_attention(sequence, None, torch.float32) - expected
    ).abs().max() + 1e-5


def test_pages_beyond_two_billion_elements() -> None:
    kernels = the_extension()
    num_blocks = 2**31 // (16 * 64) + 5
    k, v = (kernels.empty_pages((num_blocks, 1, 16, 64), torch.float32) for _ in range(2))
    sequence = draw_sequence(30, 1, 2, 1, 64, seed=12)
    table = torch.tensor([[num_blocks - 1, num_blocks - 3]], dtype=torch.int32)
    slots = torch.cat([table[0, 0].long() * 16 + torch.arange(16), table[0, 1].long() * 16 + torch.arange(14)])
    kernels.write_kv(sequence.k, sequence.v, k, v, slots)
    assert torch.equal(k[num_blocks - 1, 0], sequence.k[:16, 0])
    one = torch.tensor([0, 1], dtype=torch.int32)
    out = kernels.paged_attention(sequence.q[-1:], k, v, one, torch.tensor([30], dtype=torch.int32), table, 0.125)
    torch.testing.assert_close(out.double(), dense_attention(sequence, None), rtol=1e-5, atol=1e-6)


def test_skipped_slots_write_nothing() -> None:
    kernels = the_extension()
    k, v = torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2)
    kernels.write_kv(torch.ones(2, 1, 2), torch.ones(2, 1, 2) * 2, k, v, torch.tensor([-1, 5]))
    assert k.nonzero()[:, :3].unique(dim=0).tolist() == v.nonzero()[:, :3].unique(dim=0).tolist() == [[1, 0, 1]]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.ones(2, 4, 8, dtype=torch.float16)}, "q_THD"),
        ({"q": torch.ones(2, 4, 7)}, "q_THD"),
        ({"q": torch.ones(4, 2, 8).transpose(0, 1)}, "contiguous"),
        ({"q": torch.ones(2, 3, 8)}, "multiple of 2"),
        ({"k": torch.ones(3, 2, 16, 8).half()}, "k_cache"),
        ({"k": torch.ones(3, 2, 16, 16)[..., :8]}, "contiguous"),
        ({"k": torch.ones(0, 2, 16, 8), "v": torch.ones(0, 2, 16, 8)}, "no dimension"),
        ({"v": torch.ones(4, 2, 16, 8)}, "v_cache"),
        ({"cu": int32(0, 3)}, "0 to 2"),
        ({"cu": torch.tensor([0, 2])}, "cu_query"),
        ({"context": int32(1)}, "2 queries and 1 keys"),
        ({"context": int32(33)}, "hold 32"),
        ({"context": int32(2, 2)}, "cu_query"),
        ({"cu": int32(0, 2, 2), "context": int32(2, 0), "table": int32(0, 1, 0, 1).view(2, 2)}, "at least 1 key"),
        ({"table": int32(0, 3).view(1, 2)}, "outside the cache of 3"),
        ({"table": int32(-1, 0).view(1, 2)}, "outside the cache of 3"),
        ({"window": 0}, "window"),
    ],
)
def test_attention_refuses(changed: dict, message: str) -> None:
    arguments = {
        "q": torch.ones(2, 4, 8),
        "k": torch.ones(3, 2, 16, 8),
        "v": torch.ones(3, 2, 16, 8),
        "cu": int32(0, 2),
        "context": int32(20),
        "table": int32(0, 2).view(1, 2),
        "scale": 1.0,
        "window": None,
    } | changed
    with pytest.raises(ValueError, match=message):
        the_extension().paged_attention(*arguments.values())


@pytest.mark.parametrize("slots", [torch.tensor([0, 8]), torch.tensor([-2, 0]), torch.tensor([0]), int32(0, 1)])
def test_writing_refuses(slots: Tensor) -> None:
    k, v = torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2)
    with pytest.raises(ValueError, match=r"slot|k_TKD"):
        the_extension().write_kv(torch.ones(2, 1, 2), torch.ones(2, 1, 2), k, v, slots)
    assert not k.any()
