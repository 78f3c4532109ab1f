"""Causal attention within a window, exact, in time proportional to tokens × window and the memory of its arguments.

Queries are taken in blocks; a block attends to its own keys and to the window before it, cut out of the keys by a
strided view. A few blocks are computed at a time, forward and backward, and their probabilities are forgotten: the
backward pass computes them again from queries and keys, which are all that is kept (as FlashAttention does,
https://arxiv.org/abs/2205.14135).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.kernels.dispatch import SCORES_AT_ONCE, autocast_together

_BLOCK = 128  # queries; 64 … 256 are equally fast on a CPU, more wastes work on masked keys


def sliding_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int) -> Tensor:
    """Attention of each token to itself and the window − 1 tokens before it, scaled by 1/√D; differentiable once;
    softmax in float32 or wider.

    Args:
        q_BHTD: (B, H, T, D) floating.
        k_BKTD, v_BKTD: (B, KV, T, D) and (B, KV, T, any); H is a multiple of KV.
        window: keys that a query sees, itself included, > 0.

    Returns:
        (B, H, T, D) of v's last size.

    Raises:
        ValueError: shapes that do not fit, or a window below 1.
    """
    if q_BHTD.dim() != 4 or k_BKTD.shape[:3] != v_BKTD.shape[:3] or q_BHTD.shape[1] % k_BKTD.shape[1] or window < 1:
        raise ValueError(
            f"q has shape {tuple(q_BHTD.shape)}, k {tuple(k_BKTD.shape)}, v {tuple(v_BKTD.shape)}, window {window}; "
            "(B, H, T, D), (B, KV, T, D), (B, KV, T, any) and 1 or more are needed"
        )
    if window >= q_BHTD.shape[2]:
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=True)
    q, k, v = autocast_together(q_BHTD, k_BKTD, v_BKTD)
    out: Tensor = _Attend.apply(q.unflatten(1, (k.shape[1], -1)), k, v, window)  # pyright: ignore[reportAssignmentType]
    return out.flatten(1, 2)


class _Attend(torch.autograd.Function):
    """B sequences, K key heads, G queries' heads that share a key head, T tokens, N blocks, L keys of a block."""

    @staticmethod
    def forward(ctx: Any, q_BKGTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, window: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q_BKGTD, k_BKTD, v_BKTD)
        ctx.window = window
        # Tokens before heads, the order in which the layer's output projection reads them.
        batch, kv_heads, group, tokens, _ = q_BKGTD.shape
        out = q_BKGTD.new_empty(batch, tokens, kv_heads, group, v_BKTD.shape[3]).permute(0, 2, 3, 1, 4)
        for piece in _pieces(q_BKGTD, window):
            probability = piece.probability(q_BKGTD, k_BKTD).to(v_BKTD.dtype)
            piece.put(out, probability @ piece.keys(v_BKTD))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v = ctx.saved_tensors
        grad_q = torch.empty_like(q)
        wide = torch.promote_types(q.dtype, torch.float32)  # several blocks add to a key's gradient
        grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for piece in _pieces(q, ctx.window):
            probability = piece.probability(q, k)
            grad_out = piece.queries(gradient)
            piece.add_keys(grad_v, probability.to(v.dtype).mT @ grad_out)
            change = (grad_out @ piece.keys(v).mT).to(probability.dtype)
            change -= (change * probability).sum(-1, keepdim=True)
            change = change.mul_(probability).mul_(q.shape[-1] ** -0.5).to(q.dtype)
            piece.put(grad_q, change @ piece.keys(k))
            piece.add_keys(grad_k, change.mT @ piece.queries(q))
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


class _Piece:
    """A few neighbouring blocks: tokens `begin` to `end`, the last block filled up with tokens that do not exist."""

    def __init__(self, begin: int, end: int, window: int, band_QL: Tensor) -> None:
        self._begin, self._end = begin, end
        self._blocks = -(-(end - begin) // _BLOCK)
        self._before = window - 1
        self._band_QL = band_QL

    def queries(self, x_BKGTD: Tensor) -> Tensor:
        """→ (B, K, N, G · block, D)."""
        x = x_BKGTD[:, :, :, self._begin : self._end]
        x = F.pad(x, (0, 0, 0, self._blocks * _BLOCK - x.shape[3]))
        return x.unflatten(3, (self._blocks, _BLOCK)).transpose(2, 3).flatten(3, 4)

    def keys(self, x_BKTD: Tensor) -> Tensor:
        """→ (B, K, N, L, D), a view that overlaps; zeros before the first token and behind the last."""
        first, last = self._begin - self._before, self._begin + self._blocks * _BLOCK
        x = F.pad(x_BKTD[:, :, max(first, 0) : self._end], (0, 0, max(-first, 0), last - self._end))
        return x.unfold(2, self._before + _BLOCK, _BLOCK).mT

    def probability(self, q_BKGTD: Tensor, k_BKTD: Tensor) -> Tensor:
        """(B, K, N, G · block, L) in float32 or wider."""
        score = self.queries(q_BKGTD) @ self.keys(k_BKTD).mT
        score = score.to(torch.promote_types(score.dtype, torch.float32)).mul_(q_BKGTD.shape[-1] ** -0.5)
        each_head = score.unflatten(3, (-1, _BLOCK))
        each_head += self._band_QL
        for block in range(-(-max(self._before - self._begin, 0) // _BLOCK)):  # those that reach before the first token
            score[:, :, block : block + 1, :, : self._before - self._begin - block * _BLOCK] = -torch.inf
        return score.softmax(-1)

    def put(self, out_BKGTD: Tensor, x_BKNQD: Tensor) -> None:
        """Write (B, K, N, G · block, D) where its tokens are."""
        x = x_BKNQD.unflatten(3, (-1, _BLOCK)).transpose(2, 3).flatten(3, 4)
        out_BKGTD[:, :, :, self._begin : self._end] = x[:, :, :, : self._end - self._begin]

    def add_keys(self, out_BKTD: Tensor, x_BKNLD: Tensor) -> None:
        """Add (B, K, N, L, D) where its keys are."""
        for block, x in enumerate(x_BKNLD.unbind(2)):
            first = self._begin + block * _BLOCK - self._before
            part = out_BKTD[:, :, max(first, 0) : first + x.shape[2]]
            part += x[:, :, max(-first, 0) :][:, :, : part.shape[2]]


def _pieces(q_BKGTD: Tensor, window: int) -> Iterator[_Piece]:
    batch, kv_heads, group, tokens, _ = q_BKGTD.shape
    num_keys = window - 1 + _BLOCK
    size = (
        max(
            1,
            SCORES_AT_ONCE.get(q_BKGTD.device.type, SCORES_AT_ONCE["cpu"])
            // (batch * kv_heads * group * _BLOCK * num_keys),
        )
        * _BLOCK
    )
    query = torch.arange(_BLOCK, device=q_BKGTD.device)[:, None] + window - 1
    key = torch.arange(num_keys, device=q_BKGTD.device)
    band_QL = torch.where((key <= query) & (key > query - window), 0.0, -torch.inf)
    for begin in range(0, tokens, size):
        yield _Piece(begin, min(begin + size, tokens), window, band_QL)
