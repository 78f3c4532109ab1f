# pyright: reportCallIssue=false, reportArgumentType=false
# Tensors and scales are passed as one list of arguments.
"""Paged attention against a 64-bit reference: decode, chunked prefill, windows, INT8 pages, split keys, huge pools."""

from __future__ import annotations

import inspect
import re
import struct

import pytest
import torch
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.paged_attention import paged_attention
from tests.kernels.gpu.error_rule import assert_as_close_as_torch
from tests.kernels.paging import Cache, Sequence, dense_attention, draw_sequence

pytest.importorskip("triton")
from penjing.kernels.gpu.paged_attention import supports
from penjing.kernels.gpu.paged_segment import widened


def sequences(head_dim: int = 16, heads: int = 6, kv_heads: int = 2) -> list[Sequence]:
    """Mixed: one token, a chunk behind a prefix, a whole prompt."""
    shapes = [(1, 1), (140, 1), (101, 23), (30, 30)]
    return [draw_sequence(*shape, heads, kv_heads, head_dim, seed=seed) for seed, shape in enumerate(shapes)]


def attend(
    cache: Cache, chosen: list[Sequence], window: int | None, device: str, segment_keys: int = 64
) -> list[Tensor]:
    """The kernels' answer for the new rows; `cache` holds `chosen` in their order."""
    from penjing.kernels.gpu.paged_attention import paged_attention as launch

    lengths = torch.tensor([0] + [s.num_queries for s in chosen]).cumsum(0)
    q = torch.cat([s.q[s.context - s.num_queries :] for s in chosen])
    context = torch.tensor([s.context for s in chosen], dtype=torch.int32)
    tensors = [x.to(device) for x in (q, cache.k, cache.v, lengths.to(torch.int32), context, cache.table)]
    scales = [x.to(device) for x in cache.scales]
    arguments = (*tensors, q.shape[2] ** -0.5, window, *scales)
    out = launch(*arguments, segment_keys=segment_keys).cpu()
    return list(out.split([s.num_queries for s in chosen]))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [16, 48])
def test_mixed_batch(gpu_device: str, block_size: int, window: int | None) -> None:
    drawn = sequences()
    with force_torch():
        cache = Cache(drawn, block_size, seed=0)
    for row, found in enumerate(attend(cache, drawn, window, gpu_device)):
        same = dense_attention(drawn[row], window, torch.float32)
        assert_as_close_as_torch(f"row {row}", found, same, dense_attention(drawn[row], window))


@pytest.mark.parametrize("window", [None, 20])
def test_int8_pages(gpu_device: str, window: int | None) -> None:
    drawn = sequences(heads=4)
    with force_torch():
        cache = Cache(drawn, 16, seed=1, dtype=torch.int8)
        expected = cache.attend_new(drawn, window)
    for found, torch_answer in zip(attend(cache, drawn, window, gpu_device), expected, strict=True):
        torch.testing.assert_close(found, torch_answer, rtol=1e-5, atol=2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's bfloat16 is wrong")
def test_int8_pages_beside_bfloat16(gpu_device: str) -> None:
    """Codes are widened by instructions of their own there."""
    drawn = sequences(heads=4)
    with force_torch():
        cache = Cache(drawn, 16, seed=1, dtype=torch.int8)
        expected = cache.attend_new(drawn, None)
    half = [Sequence(s.q.bfloat16(), s.k, s.v, s.num_queries) for s in drawn]
    for found, torch_answer in zip(attend(cache, half, None, gpu_device), expected, strict=True):
        torch.testing.assert_close(found.float(), torch_answer, rtol=2e-2, atol=2e-2)


def test_the_instructions_that_widen_codes_give_their_values() -> None:
    """Every byte at every place, by what PTX's manual says of the instructions; no GPU is needed for that."""
    asm = re.search(r'"""\{(.*?)\}"""', inspect.getsource(widened.fn), re.DOTALL)
    assert asm is not None
    for place in range(4):
        for code in range(-128, 128):
            other = -1 - code
            codes = [code if each == place else other for each in range(4)]
            words = {"$4": int.from_bytes(bytes(each & 255 for each in codes), "little")}
            for line in asm[1].split(";"):
                run_ptx(line.strip(), words)
            assert [words[f"${each}"] for each in range(4)] == codes


def run_ptx(line: str, values: dict[str, int]) -> None:
    """One instruction on 32-bit registers; a half that `mov` takes apart is written as the number that it is."""
    name, _, rest = line.partition(" ")
    if name in ("", ".reg"):
        return
    if name == "mov.b32":
        low, high, source = re.findall(r"[$\w]+", rest)
        values[low], values[high] = (int(from_bfloat16(values[source] >> shift & 0xFFFF)) for shift in (0, 16))
        return
    target, *given = (each.strip() for each in rest.split(","))
    a, b, *selector = (values[each] if each in values else int(each, 16) for each in given)
    if name == "and.b32":
        values[target] = a & b
    elif name == "prmt.b32":
        eight = a | b << 32
        places = [selector[0] >> 4 * nibble & 7 for nibble in range(4)]
        values[target] = sum((eight >> 8 * each & 255) << 8 * i for i, each in enumerate(places))
    else:
        assert name == "sub.bf16x2"
        halves = [from_bfloat16(a >> shift & 0xFFFF) - from_bfloat16(b >> shift & 0xFFFF) for shift in (0, 16)]
        bits = [int(torch.tensor(each).bfloat16().view(torch.int16)) & 0xFFFF for each in halves]
        values[target] = bits[0] | bits[1] << 16


def from_bfloat16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


@pytest.mark.parametrize("window", [None, 70])
def test_decode_and_prefill_give_equal_bits(gpu_device: str, window: int | None) -> None:
    """A row's bits depend on its own sequence: not on the batch, nor on whether its keys were split among blocks."""
    drawn = sequences()
    last = [Sequence(s.q, s.k, s.v, 1) for s in drawn]
    with force_torch():
        cache = Cache(drawn, 16, seed=2)
    together = attend(cache, drawn, window, gpu_device)  # the keys in turn
    split = attend(cache, last, window, gpu_device)  # a block for each segment
    for whole, single in zip(together, split, strict=True):
        assert torch.equal(whole[-1:], single)


def test_any_number_of_splits_is_right(gpu_device: str) -> None:
    drawn = [draw_sequence(context, 1, 4, 1, 32, seed=context) for context in (200, 64, 65)]
    with force_torch():
        cache = Cache(drawn, 32, seed=3)
    for segment_keys in (64, 128, 512):
        for row, found in enumerate(attend(cache, drawn, None, gpu_device, segment_keys)):
            same = dense_attention(drawn[row], None, torch.float32)
            assert_as_close_as_torch(f"row {row}", found, same, dense_attention(drawn[row], None))


def test_the_public_function_takes_the_kernels(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.kernels.gpu import paged_attention as gpu

    calls = []
    launch = gpu.paged_attention
    monkeypatch.setattr(gpu, "paged_attention", lambda *arguments: (calls.append(1), launch(*arguments))[1])
    drawn = sequences()[2:]
    with force_torch():
        cache = Cache(drawn, 16, seed=4)
    cache.k, cache.v, cache.table = (x.to(gpu_device) for x in (cache.k, cache.v, cache.table))
    lengths = torch.tensor([0, 23, 53], dtype=torch.int32, device=gpu_device)
    context = torch.tensor([101, 30], dtype=torch.int32, device=gpu_device)
    q = torch.cat([s.q[-s.num_queries :] for s in drawn]).to(gpu_device)
    out = paged_attention(q, cache.k, cache.v, lengths, context, cache.table, 0.25).cpu()
    torch.testing.assert_close(out[:23], dense_attention(drawn[0], None, torch.float32), rtol=1e-5, atol=1e-5)
    assert calls
    with pytest.raises(ValueError, match="window=0"):
        paged_attention(q, cache.k, cache.v, lengths, context, cache.table, 0.25, 0)


@pytest.mark.parametrize("block", [-1, 9])
def test_a_block_outside_the_cache_gives_nan_in_its_rows_alone(gpu_device: str, block: int) -> None:
    drawn = [draw_sequence(20, 1, 2, 1, 16, seed=seed) for seed in range(2)]
    with force_torch():
        cache = Cache(drawn, 16, seed=5)
    assert len(cache.k) <= 9
    cache.table[0, 0] = block
    bad, good = attend(cache, drawn, None, gpu_device)
    assert bad.isnan().all()
    assert torch.isfinite(good).all()


def test_no_tokens(gpu_device: str) -> None:
    drawn = [draw_sequence(20, 0, 2, 1, 16, seed=0)]
    with force_torch():
        cache = Cache(drawn, 16, seed=6)
    assert attend(cache, drawn, None, gpu_device)[0].shape == (0, 2, 16)


def test_pages_beyond_32_bits(gpu_device: str) -> None:
    """A pool of 2³¹ values and more; on a CPU it is virtual memory, of which the last page alone is touched."""
    num_blocks, page, head_dim = 2**31 // (16 * 64) + 5, 16, 64
    shape = (num_blocks, 1, page, head_dim)
    k, v = (torch.empty(shape, dtype=torch.float16, device=gpu_device) for _ in range(2))
    drawn = draw_sequence(10, 1, 2, 1, head_dim, seed=7)
    k[-1, 0, :10], v[-1, 0, :10] = drawn.k[:, 0].half(), drawn.v[:, 0].half()
    from penjing.kernels.gpu.paged_attention import paged_attention as launch

    numbers = [torch.tensor(x, dtype=torch.int32, device=gpu_device) for x in ([0, 1], [10], [[num_blocks - 1]])]
    arguments = (drawn.q[-1:].half().to(gpu_device), k, v, *numbers, head_dim**-0.5)
    out = launch(*arguments).cpu()
    torch.testing.assert_close(out.float(), dense_attention(drawn, None, torch.float32), rtol=5e-3, atol=5e-3)


def test_segments_of_the_fast_mode() -> None:
    from penjing.kernels.gpu.paged_attention import segment_keys_for

    assert segment_keys_for(1, 8, 32768, 132) == 1024  # 32 segments × 8 heads: about two blocks a processor
    assert segment_keys_for(64, 8, 32768, 132) == 32768
    assert segment_keys_for(1, 8, 100, 132) == 128
    assert segment_keys_for(0, 8, 100, 132) % 64 == 0


def test_a_segment_is_whole_key_blocks(gpu_device: str) -> None:
    drawn = [draw_sequence(20, 1, 2, 1, 16, seed=0)]
    with force_torch():
        cache = Cache(drawn, 16, seed=8)
    with pytest.raises(ValueError, match=re.escape("segment_keys=100; a multiple of 64")):
        attend(cache, drawn, None, gpu_device, 100)


def test_codes_that_fill_no_word_run_on_torch() -> None:
    q, pages = torch.zeros(1, 2, 6), torch.zeros(1, 1, 16, 6, dtype=torch.int8)
    assert not supports(q, pages)
    assert supports(q, pages.float())
    assert supports(torch.zeros(1, 2, 8), torch.zeros(1, 1, 16, 8, dtype=torch.int8))
