from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from penjing.kernels.sliding_attention import sliding_attention


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask & ~mask.tril(-window), enable_gqa=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize(
    ("num_tokens", "window"), [(1, 1), (131, 1), (300, 7), (300, 171), (300, 172), (513, 128), (90, 99)]
)
def test_equals_attention_under_a_dense_mask_with_gradients(
    num_tokens: int, window: int, heads: int, kv_heads: int
) -> None:
    torch.manual_seed(num_tokens + window)
    q, k, v = (
        torch.randn(2, count, num_tokens, 8, dtype=torch.float64, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    ours, theirs = sliding_attention(q, k, v, window), dense(q, k, v, window)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradient = torch.randn_like(ours)
    for mine, expected in zip(
        torch.autograd.grad(ours, (q, k, v), gradient), torch.autograd.grad(theirs, (q, k, v), gradient), strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


def test_nothing_of_tokens_times_tokens_is_kept_for_the_backward_pass() -> None:
    q, k, v = (torch.randn(1, 2, 4096, 8, requires_grad=True) for _ in range(3))
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        sliding_attention(q, k, v, 64)
    assert max(saved) < 4 * 4096 * 1024  # a square of float32 would be 64 MiB, of bool 16


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k = torch.randn(1, 3, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="are needed"):
        sliding_attention(q, k, k, 4)
    with pytest.raises(ValueError, match="window 0"):
        sliding_attention(k, k, k, 0)


def test_tensors_without_data_have_the_shapes_that_data_would() -> None:
    q, k, v = (torch.empty(1, count, 300, 8, device="meta", requires_grad=True) for count in (4, 2, 2))
    out = sliding_attention(q, k, v, 16)
    out.sum().backward()
    assert (out.shape, k.grad.shape) == (q.shape, k.shape)  # type: ignore[union-attr]
