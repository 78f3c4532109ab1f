"""The log-probability of each token, without a float32 copy of the logits, and the entropy of its distribution.

As the cross-entropy beside it: rows go through float32 a block at a time, and only the logits are kept for the backward
pass. The loss of an answer weighs its tokens itself, so a sum is not enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from penjing.train.objective.cross_entropy import row_blocks


def token_logprobs(logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each row's token and the entropy of each row, differentiable once.

    Args:
        logits_NV: (N, V) floating; divided by `temperature` > 0.
        tokens_N: (N,) int64 in [0, V).

    Returns:
        Two of shape (N,), float32 or the wider type of the logits.
    """
    return _TokenLogprobs.apply(logits_NV, tokens_N, temperature)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        precise = torch.promote_types(logits.dtype, torch.float32)
        found, entropy, normaliser = (torch.empty(len(logits), dtype=precise, device=logits.device) for _ in range(3))
        for rows in row_blocks(logits):
            wide = logits[rows].to(precise) / temperature
            normaliser[rows] = torch.logsumexp(wide, -1)
            found[rows] = wide.gather(1, tokens[rows, None])[:, 0] - normaliser[rows]
            wide -= normaliser[rows, None]
            entropy[rows] = -(wide.exp() * wide).sum(-1)
        ctx.save_for_backward(logits, normaliser, tokens, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # most losses leave the entropy out
        return found, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, normaliser, tokens, entropy = ctx.saved_tensors
        of_logprobs, of_entropy = (
            None if gradient is None else (gradient / ctx.temperature)[:, None] for gradient in gradients
        )
        result = torch.zeros_like(logits)
        for rows in row_blocks(logits):
            logprobs = logits[rows].to(normaliser.dtype) / ctx.temperature - normaliser[rows, None]
            shares = logprobs.exp()
            if of_logprobs is not None:
                wide = shares.neg()
                wide.scatter_add_(1, tokens[rows, None], torch.ones_like(wide[:, :1]))
                result[rows] = wide.mul_(of_logprobs[rows])
            if of_entropy is not None:  # dH / dlogit = −p (log p + H)
                result[rows] -= shares.mul_(logprobs.add_(entropy[rows, None])).mul_(of_entropy[rows])
        return result, None, None
