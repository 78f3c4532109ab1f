# pyright: reportCallIssue=false, reportArgumentType=false
# Tensors and scales are passed as one list of arguments.
"""Paged attention to a window and selected blocks: against a dense 64-bit reference, on torch and in the kernels."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.paged_attention import paged_attention
from tests.kernels.gpu.error_rule import assert_as_close_as_torch
from tests.kernels.paging import Cache, Sequence, draw_sequence

pytest.importorskip("triton")
PAGE, WINDOW = 16, 20
SHAPES = [(140, 1), (101, 23), (30, 30), (5, 1)]
# The last two of the first row: within the window, and only begun before it.
LISTS = [[0, 5, 3, -1, 8, 7], [2, -1, 0, 4, 5, -1], [0, 1, -1, -1, -1, -1], [-1] * 6]


def drawn(decode: bool = False) -> list[Sequence]:
    shapes = [(context, 1 if decode else queries) for context, queries in SHAPES]
    return [draw_sequence(*shape, 4, 2, 16, seed=seed) for seed, shape in enumerate(shapes)]


def dense(sequence: Sequence, blocks: list[int], dtype: torch.dtype) -> Tensor:
    """torch's attention with a mask."""
    position = torch.arange(sequence.context - sequence.num_queries, sequence.context)[:, None]
    key = torch.arange(sequence.context)
    listed = torch.tensor([int(k) // PAGE in blocks for k in key])
    mask = (key <= position) & ((key > position - WINDOW) | listed)
    group = sequence.q.shape[1] // sequence.k.shape[1]
    q = sequence.q[sequence.context - sequence.num_queries :]
    parts = (q, sequence.k.repeat_interleave(group, 1), sequence.v.repeat_interleave(group, 1))
    q, k, v = (x.to(dtype).transpose(0, 1) for x in parts)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


def attend(cache: Cache, chosen: list[Sequence], device: str, lists: list[list[int]] = LISTS) -> list[Tensor]:
    lengths = [s.num_queries for s in chosen]
    cu_query = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    context = torch.tensor([s.context for s in chosen], dtype=torch.int32)
    q = torch.cat([s.q[s.context - s.num_queries :] for s in chosen])
    selected = torch.tensor(lists, dtype=torch.int32)
    inputs = [x.to(device) for x in (q, cache.k, cache.v, cu_query, context, cache.table)]
    scales = [x.to(device) for x in cache.scales] or [None, None]
    out = paged_attention(*inputs, 0.25, WINDOW, *scales, selected.to(device))
    return list(out.cpu().split(lengths))


@pytest.mark.parametrize("decode", [False, True])
def test_kernels_and_reference(gpu_device: str, decode: bool) -> None:
    sequences = drawn(decode)
    with force_torch():
        cache = Cache(sequences, PAGE, seed=0)
        on_torch = attend(cache, sequences, "cpu")
    found = attend(cache, sequences, gpu_device)
    for i, sequence in enumerate(sequences):
        exact, same = (dense(sequence, LISTS[i], dtype) for dtype in (torch.float64, torch.float32))
        assert_as_close_as_torch(f"kernel {i}", found[i], same, exact)
        assert_as_close_as_torch(f"reference {i}", on_torch[i], same, exact)


def test_int8_pages(gpu_device: str) -> None:
    sequences = drawn()
    with force_torch():
        cache = Cache(sequences, PAGE, seed=1, dtype=torch.int8)
        expected = attend(cache, sequences, "cpu")
    for row, other in zip(attend(cache, sequences, gpu_device), expected, strict=True):
        torch.testing.assert_close(row, other, rtol=1e-5, atol=2e-5)


def test_split_or_not_the_bits_are_equal(gpu_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from penjing.kernels.gpu import paged_attention as gpu

    launch = gpu.paged_attention
    monkeypatch.setattr(gpu, "paged_attention", lambda *tensors: launch(*tensors, segment_keys=64))
    whole, single = drawn(), drawn(decode=True)
    with force_torch():
        cache = Cache(whole, PAGE, seed=2)
    together, split = attend(cache, whole, gpu_device), attend(cache, single, gpu_device)
    # Rows at one place of their tile: the interpreter's products are numpy's, where the place moves the last bit.
    for i in (0, 3):
        assert torch.equal(together[i], split[i])


@pytest.mark.parametrize(
    ("lists", "message"),
    [([[0, 0]], "sequence 0 selects the blocks [0, 0]; each once"), ([[9, 1]], "from 0 to 2")],
)
def test_lists_that_do_not_fit_are_refused_on_the_cpu(lists: list[list[int]], message: str) -> None:
    sequences = [draw_sequence(30, 1, 2, 1, 16, seed=0)]
    with force_torch():
        cache = Cache(sequences, PAGE, seed=3)
        with pytest.raises(ValueError, match=re.escape(message)):
            attend(cache, sequences, "cpu", lists)


def test_selected_blocks_need_a_window() -> None:
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [1], [[0]])]
    q, page = torch.ones(1, 1, 16), torch.ones(1, 1, 16, 16)
    with pytest.raises(ValueError, match="give one"):
        paged_attention(q, page, page, *numbers, 1.0, selected_SN=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=re.escape("int32 (1, N)")):
        paged_attention(q, page, page, *numbers, 1.0, 4, selected_SN=torch.zeros(1, 1, dtype=torch.int64))
