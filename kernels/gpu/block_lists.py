"""Lists of blocks of keys, as block-sparse attention takes them; needs no Triton language."""

from __future__ import annotations

import torch


def listed(key_blocks_BKQJ: torch.Tensor) -> torch.Tensor:
    """(B, KV, Q, Q) bool: query block × key block, from the lists; entries outside [0, Q) are passed over."""
    num_blocks = key_blocks_BKQJ.shape[2]
    inside = (key_blocks_BKQJ >= 0) & (key_blocks_BKQJ < num_blocks)
    index = torch.where(inside, key_blocks_BKQJ, num_blocks).long()
    table = torch.zeros(*key_blocks_BKQJ.shape[:3], num_blocks + 1, dtype=torch.bool, device=index.device)
    return table.scatter_(-1, index, True)[..., :num_blocks]
