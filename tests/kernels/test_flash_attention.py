from __future__ import annotations

import pytest
import torch

from penjing.kernels.flash_attention import flash_attention


@pytest.mark.parametrize(("queries", "keys", "window"), [(1600, 2000, None), (1600, 2000, 200), (1600, 1400, 40)])
def test_many_rows_are_exact_and_keep_no_mask(queries: int, keys: int, window: int | None) -> None:
    """Against the definition, in float64; what is kept for the gradients does not grow with queries × keys."""
    torch.manual_seed(0)
    q = torch.randn(1, queries, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, keys, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours = flash_attention(q, k, v, window=window)
    assert sum(kept.values()) < 0.9 * queries * keys  # bytes of a mask of all rows
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    seen = (distance >= 0) & (distance < (window or keys))
    score = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) / 8**0.5
    probability = score.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    theirs = torch.einsum("bhts,bshd->bthd", probability, v.repeat_interleave(2, 2))
    torch.testing.assert_close(ours, theirs)
    grad = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, (q, k, v), grad)
    torch.testing.assert_close(mine, torch.autograd.grad(theirs, (q, k, v), grad))
