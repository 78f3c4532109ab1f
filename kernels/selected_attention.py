"""Reference of paged attention to a window and to selected blocks of older keys (`kernels.paged_attention`)."""

from __future__ import annotations

from itertools import pairwise

import torch

from penjing.kernels.cpu.kv_layout import LayerCache


def selected_attention_torch(
    q_THD: torch.Tensor,
    cache: LayerCache,
    cu_query: list[int],
    context_len: list[int],
    block_table_SB: torch.Tensor,
    scale: float,
    window: int,
    selected_SN: torch.Tensor,
) -> torch.Tensor:
    """`paged_attention` with `selected_SN`, after its checks: float32, one dense product a sequence and head group.

    Keys that no row sees are gathered too, so their blocks must exist. Rows are not bit-equal across batches.

    Raises:
        ValueError: a block id outside the cache among those that are read.
    """
    out_THD = torch.zeros_like(q_THD)
    num_blocks, kv_heads, size, _ = cache.k.shape
    group = q_THD.shape[1] // kv_heads
    head = torch.arange(kv_heads, device=q_THD.device)[:, None]
    for sequence, (start, end) in enumerate(pairwise(cu_query)):
        if start == end:
            continue
        last = context_len[sequence] - 1
        position_Q = torch.arange(last - (end - start) + 1, last + 1, device=q_THD.device)
        first = max(int(position_Q[0]) - window + 1, 0)
        chosen = selected_SN[sequence]
        blocks = chosen[(chosen >= 0) & (chosen * size <= last - window)].long()
        older = (blocks[:, None] * size + torch.arange(size, device=q_THD.device)).flatten()
        older = older[older <= last - window]
        key_K = torch.cat([older, torch.arange(first, last + 1, device=q_THD.device)])
        page_K = block_table_SB[sequence].long()[key_K // size]
        if page_K.min() < 0 or page_K.max() >= num_blocks:
            raise ValueError(f"the block table of sequence {sequence} leaves the cache of {num_blocks} blocks")
        rows = (page_K * kv_heads + head) * size + key_K % size
        k, v = (x.view(kv_heads, 1, len(key_K), -1) for x in cache.gather(rows.flatten()))
        before = key_K <= position_Q[:, None] - window
        listed = torch.arange(len(key_K), device=q_THD.device) < len(older)
        seen_QK = torch.where(listed, before, (key_K <= position_Q[:, None]) & ~before)
        q = q_THD[start:end].float().unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        score = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen_QK, -torch.inf)
        out = torch.softmax(score, -1) @ v
        out_THD[start:end] = out.permute(2, 0, 1, 3).flatten(1, 2).to(q_THD.dtype)
    return out_THD
