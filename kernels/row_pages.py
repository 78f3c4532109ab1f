"""Rows of tokens in pages, beside keys and values: what a short convolution reads of the tokens before its own.

A row is a function of its token and those before it, and lies in the block and at the place of its keys. So a sequence
finds the rows that it would have computed, whether others share its beginning, or it is computed again, in other chunks
or with guesses that did not come true.
"""

from __future__ import annotations

import torch


def write_rows(x_TE: torch.Tensor, pages: torch.Tensor, slot_T: torch.Tensor) -> None:
    """Store the rows of T tokens.

    Args:
        x_TE: (T, hidden) floating.
        pages: (num_blocks, block_size, hidden), written in place.
        slot_T: (T,) int64, block × block_size + offset; −1 skips the token. Slots of one call are distinct.

    Raises:
        ValueError: a wrong shape.
    """
    if x_TE.shape != (len(slot_T), pages.shape[-1]) or pages.dim() != 3:
        raise ValueError(f"x has shape {tuple(x_TE.shape)}; {(len(slot_T), pages.shape[-1])} is needed")
    kept = slot_T >= 0
    pages.view(-1, pages.shape[-1])[slot_T[kept]] = x_TE[kept].to(pages.dtype)


def rows_before(
    pages: torch.Tensor,
    cu_query_S1: torch.Tensor,
    context_len_S: torch.Tensor,
    block_table_SB: torch.Tensor,
    count: int,
) -> list[torch.Tensor]:
    """What lies 1 … `count` places before each of T tokens of S sequences, the farthest first.

    Args:
        pages: (num_blocks, block_size, hidden).
        cu_query_S1: (S + 1,) int32, first token of each sequence, then T.
        context_len_S: (S,) int32, tokens of each sequence, its new ones included.
        block_table_SB: (S, B) int32.

    Returns:
        `count` tensors (T, hidden) of the pages' dtype; zeros before the first token of a sequence.
    """
    size, device = pages.shape[1], pages.device
    lengths_S = cu_query_S1.diff().long()
    total = int(cu_query_S1[-1])
    sequence_T = torch.arange(len(lengths_S), device=device).repeat_interleave(lengths_S, output_size=total)
    first_S = context_len_S - cu_query_S1[1:]  # position of a sequence's first new token, less its row
    position_T = torch.arange(total, device=device) + first_S[sequence_T]
    rows = pages.view(-1, pages.shape[-1])
    found = []
    for distance in range(count, 0, -1):
        far_T = position_T - distance
        inside_T = far_T.clamp(min=0)
        slot_T = block_table_SB[sequence_T, inside_T // size].long() * size + inside_T % size
        found.append(torch.where((far_T >= 0)[:, None], rows[slot_T], 0.0))
    return found
