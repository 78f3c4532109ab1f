from __future__ import annotations

from typing import Any

import torch

from penjing.train.parallel.context import Context


def _contexts(size: int) -> list[Context]:
    nobody: Any = None
    return [Context(rank, size, nobody) for rank in range(size)]


def test_processes_share_a_sequence_so_that_all_attend_to_as_much() -> None:
    tokens = torch.arange(24).expand(2, 24)
    parts = [each.part({"tokens": tokens})["tokens"] for each in _contexts(3)]
    assert sorted(torch.cat(parts, 1)[0].tolist()) == list(range(24))
    pairs = [int((part[0] + 1).sum()) for part in parts]  # keys that its queries see
    assert len(set(pairs)) == 1


def test_positions_are_those_of_the_tokens_and_gathered_pieces_come_into_order() -> None:
    tokens = torch.arange(24).expand(2, 24)
    parts = []
    for each in _contexts(3):
        part = each.part({"tokens": tokens})["tokens"]
        torch.testing.assert_close(each.positions(2, 8, tokens.device), part)
        parts.append(part)
    for each in _contexts(3):
        torch.testing.assert_close(each._in_order(torch.cat(parts, 1)), tokens)
