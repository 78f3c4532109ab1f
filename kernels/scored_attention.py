"""Causal attention that looks at its scores: caps them softly, cap × tanh(score / cap) (Gemma 2,
https://arxiv.org/abs/2408.00118), or has a sink in each head, a score more in the sum that it divides by
(https://arxiv.org/abs/2309.17453, learned in gpt-oss).

Some queries are taken at a time, so that scores never exist all at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.kernels.dispatch import cpu_extension

_ROWS = 128  # queries


def scored_attention(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    cap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attention of each token to itself and the tokens before it, with a window to the nearest window − 1 of them.
    Scores are scaled by 1/√D; differentiable; scores and softmax in float32 or wider.

    Args:
        q_BHTD: (B, H, T, D) floating.
        k_BKTD, v_BKTD: (B, KV, S, D) and (B, KV, S, any) of S ≥ T tokens, of which queries are the last; H is a
            multiple of KV.
        cap: above 0; None: scores stay.
        sinks_H: (H,) floating.

    Returns:
        (B, H, T, D) of v's last size.
    """
    q = q_BHTD.unflatten(1, (k_BKTD.shape[1], -1)) * q_BHTD.shape[-1] ** -0.5
    k, v = k_BKTD.unsqueeze(2), v_BKTD.unsqueeze(2)
    tokens, before = k.shape[3], k.shape[3] - q.shape[3]
    made: list[Tensor] = []
    for begin in range(before, tokens, _ROWS):
        end = min(begin + _ROWS, tokens)
        first = 0 if window is None else max(0, begin - window + 1)
        score = q[..., begin - before : end - before, :] @ k[..., first:end, :].mT
        score = score.to(torch.promote_types(score.dtype, torch.float32))
        score = score if cap is None else cap * torch.tanh(score / cap)
        row, key = torch.arange(begin, end, device=q.device)[:, None], torch.arange(first, end, device=q.device)
        hidden = key > row if window is None else (key > row) | (key <= row - window)
        score = score.masked_fill(hidden, -torch.inf)
        if sinks_H is not None:
            sink = sinks_H.to(score.dtype).view(k.shape[1], -1, 1, 1).expand(*score.shape[:-1], 1)
            score = torch.cat((score, sink), -1)
        probability = score.softmax(-1)[..., : end - first].to(v.dtype)
        made.append(probability @ v[..., first:end, :])
    return torch.cat(made, dim=3).flatten(1, 2)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap × tanh(x / cap) of each element; shape and dtype of `x`, differentiable."""
    if torch.is_grad_enabled() and x.requires_grad:
        return cap * torch.tanh(x / cap)
    extension = cpu_extension(x)
    if extension is not None and x.dtype == torch.float32:
        return extension.soft_cap(x.detach(), cap)
    return soft_cap_(x.to(torch.float32, copy=True), cap).to(x.dtype)


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """cap × tanh(x / cap) in place, float32; the operations round alike wherever an element lies."""
    exponential = torch.exp(x.mul_(2 / cap))
    return x.copy_(torch.div(-2 * cap, exponential.add_(1)).add_(cap))
