"""Rows in pages: written and found again as a loop over tokens would, and what a step with convolutions needs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from penjing.core.models.decoder import Decoder
from penjing.core.runtime.batch_invariant import apply_batch_invariance
from penjing.core.runtime.fused import fuse_decoder
from penjing.kernels.row_pages import rows_before, write_rows
from tests.conftest import tiny_config
from tests.kernels.cpu import needs_extension

SIZE, WIDTH = 4, 6


def test_rows_are_those_of_the_tokens_before() -> None:
    pages = torch.full((12, SIZE, WIDTH), torch.nan)
    texts = [torch.randn(length, WIDTH) for length in (1, 9, 6)]
    tables = [[3], [7, 1, 5], [2, 9]]
    done = [0, 0, 0]
    for step in ([1, 3, 0], [0, 1, 6], [0, 5, 0]):
        chosen = [i for i in range(3) if step[i]]
        slots = [tables[i][p // SIZE] * SIZE + p % SIZE for i in chosen for p in range(done[i], done[i] + step[i])]
        x_TE = torch.cat([texts[i][done[i] : done[i] + step[i]] for i in chosen])
        write_rows(x_TE, pages, torch.tensor(slots))
        cu_query = torch.tensor([0, *(step[i] for i in chosen)]).cumsum(0).int()
        context = torch.tensor([done[i] + step[i] for i in chosen]).int()
        table = torch.nn.utils.rnn.pad_sequence([torch.tensor(tables[i]) for i in chosen], batch_first=True).int()
        for distance, found in zip((3, 2, 1), rows_before(pages, cu_query, context, table, 3), strict=True):
            wanted = [
                texts[i][p - distance] if p >= distance else torch.zeros(WIDTH)
                for i in chosen
                for p in range(done[i], done[i] + step[i])
            ]
            assert torch.equal(found, torch.stack(wanted))
        done = [before + more for before, more in zip(done, step, strict=True)]


def test_a_token_without_a_slot_is_not_written() -> None:
    pages = torch.zeros(2, SIZE, WIDTH)
    write_rows(torch.ones(2, WIDTH), pages, torch.tensor([-1, 5]))
    assert pages.view(-1, WIDTH).sum(1).nonzero().flatten().tolist() == [5]
    with pytest.raises(ValueError, match=r"x has shape \(2, 5\); \(2, 6\) is needed"):
        write_rows(torch.ones(2, 5), pages, torch.tensor([0, 1]))


@needs_extension
@pytest.mark.parametrize("taps", [1, 3, 12])
def test_a_step_of_any_rows_gives_the_same_bits(taps: int) -> None:
    """In blocks of eight tokens, of which two sequences have theirs in turn."""
    torch.manual_seed(taps)
    types = ("short_conv", "full_attention", "short_conv")
    config = tiny_config(model_type="penjing", num_hidden_layers=3, layer_types=types, conv_taps=taps)
    step = fuse_decoder(Decoder(config))
    assert step is not None
    ids, tables = torch.randint(0, 320, (2, 150)).int(), torch.arange(38).view(19, 2).t().contiguous().int()
    found = []
    for cuts in ([0, 150], [0, 1, 2, 40, 41, 120, 150], list(range(0, 151, 15))):
        pools = torch.zeros(1, 2, 38, 2, 8, 16), torch.full((2, 38, 8, 64), torch.nan)
        rows = []
        for begin, end in pairwise(cuts):
            positions = torch.arange(begin, end)
            slots = tables[:, positions // 8].long() * 8 + positions % 8
            both = torch.arange(2 * (end - begin), dtype=torch.int32)
            lengths = torch.tensor([0, end - begin, 2 * (end - begin)]).int(), torch.tensor([end, end]).int()
            numbers = (
                ids[:, begin:end].reshape(-1).contiguous(),
                positions.int().repeat(2),
                slots.flatten(),
                *lengths,
                tables,
                both,
            )
            rows.append(step.step(*numbers, pools[0], row_pool=pools[1]).clone().unflatten(0, (2, -1)))
        found.append(torch.cat(rows, 1))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_extension
def test_a_step_sees_what_is_learnt() -> None:
    """Where weights are trained beside it, they are used in place."""
    config = tiny_config(
        model_type="penjing", layer_types=("full_attention", "short_conv"), conv_taps=3, conv_bias=True
    )
    model = Decoder(config).requires_grad_(False)
    apply_batch_invariance(model)
    step = fuse_decoder(model)
    assert step is not None
    ids, positions = torch.arange(40, 47), torch.arange(7)
    lengths = torch.tensor([0, 7]).int(), torch.tensor([7]).int()
    numbers = ids.int(), positions.int(), positions, *lengths, torch.tensor([[0]]).int(), positions.int()
    for _ in range(2):
        found = step.step(*numbers, torch.zeros(1, 2, 1, 2, 8, 16), row_pool=torch.zeros(1, 1, 8, 64))
        torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-5)
        for name, parameter in model.named_parameters():
            parameter += 0.1 * torch.randn_like(parameter) * (".taps." in name)


@needs_extension
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_pool": None}, "row_pool must be given"),
        ({"row_pool": torch.zeros(1, 2, 8, 64)}, "with the blocks of kv_pool"),
        ({"row_pool": torch.zeros(2, 3, 8, 64)}, "row_pool has shape"),
        ({"row_pool": torch.zeros(1, 3, 8, 64).half()}, "row_pool"),
        ({"block_table_SB": torch.tensor([[3, 1]]).int()}, "an id outside the cache"),
    ],
)
def test_a_step_needs_the_pages_of_its_convolutions(changes: dict[str, Any], message: str) -> None:
    config = tiny_config(model_type="penjing", layer_types=("full_attention", "short_conv"), conv_taps=3)
    step = fuse_decoder(Decoder(config))
    assert step is not None
    arguments: dict[str, Any] = {
        "token_ids_T": torch.tensor([5]).int(),
        "positions_T": torch.tensor([8]).int(),
        "slot_T": torch.tensor([8]),
        "cu_query_S1": torch.tensor([0, 1]).int(),
        "context_len_S": torch.tensor([9]).int(),
        "block_table_SB": torch.tensor([[2, 1]]).int(),
        "logit_rows_R": torch.tensor([0]).int(),
        "kv_pool": torch.zeros(1, 2, 3, 2, 8, 16),
        "row_pool": torch.zeros(1, 3, 8, 64),
    }
    assert step.step(**arguments).shape == (1, 320)
    with pytest.raises(ValueError, match=message):
        step.step(**arguments | changes)
