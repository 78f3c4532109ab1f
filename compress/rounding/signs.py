"""Signs of the channels of an activation, chosen so that what sticks out of a token lies on one side of 0.

Where activations have a zero point a token, a token's step is its range over 255. A gated product is linear in
`up_proj`, whose rows may change sign if the columns of `down_proj` do too. Most of a token's range comes from a few
values that are far from 0; with all of them above 0, twice the largest magnitude becomes little more than once.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 12
ROWS = 1024  # tokens that choose: with 1536 channels a round takes 12 ms
SHARE = 4  # of the channels that would gain, a part flips at once: together they may not


def aligned_signs(x_MK: Tensor, token_M: Tensor) -> Tensor:
    """(K,) of 1 and −1 for which the sum of the tokens' squared ranges, 0 included, is small; deterministic.

    It starts with all outermost values of a token above 0, as far as a channel has one side, and flips whatever helps.

    Args:
        x_MK: (M, K ≥ 2) float32 activations.
        token_M: (M,) how much each token counts.
    """
    every = max(1, len(x_MK) // ROWS)
    x_MK, token_M = x_MK[::every].clone(), token_M[::every]
    outermost_M = x_MK.abs().argmax(dim=1)
    value_M = x_MK.gather(1, outermost_M[:, None])[:, 0]
    pull_K = torch.zeros(x_MK.shape[1]).index_add_(0, outermost_M, value_M.sign() * value_M.square() * token_M)
    sign_K = torch.where(pull_K < 0, -1.0, 1.0)
    kept_K = torch.ones_like(sign_K)
    if _squares(x_MK * sign_K, token_M) < _squares(x_MK, token_M):
        x_MK.mul_(sign_K)
        kept_K.mul_(sign_K)
    for _ in range(ROUNDS):
        flip_K = _flips(x_MK, token_M)
        if flip_K is None:
            break
        x_MK.mul_(flip_K)
        kept_K.mul_(flip_K)
    return kept_K


def _flips(x_MK: Tensor, token_M: Tensor) -> Tensor | None:
    """(K,) signs that make the ranges smaller, or None: what each channel alone would gain, and then some of them."""
    range_MK = _outermost(x_MK).sub_(_outermost(x_MK, largest=False))
    now = _squares(x_MK, token_M)
    gain_K = now - token_M @ range_MK.square_()
    order_K = gain_K.argsort(descending=True, stable=True)
    count = max(1, int((gain_K > 0).sum()) // SHARE)
    while count:
        flip_K = torch.ones(x_MK.shape[1])
        flip_K[order_K[:count]] = -1.0
        if _squares(x_MK * flip_K, token_M) < now * (1 - 1e-5):
            return flip_K
        count //= 2
    return None


def _outermost(x_MK: Tensor, largest: bool = True) -> Tensor:
    """(M, K): the largest (least) of a token and 0 if channel k alone had the other sign; `x_MK` is as before."""
    side, worst = (torch.maximum, -torch.inf) if largest else (torch.minimum, torch.inf)
    first_M1, place_M1 = (torch.max if largest else torch.min)(x_MK, dim=1, keepdim=True)
    flipped_MK = x_MK.neg()
    x_MK.scatter_(1, place_M1, worst)  # as topk finds the second, in half the time
    second_M1 = (torch.amax if largest else torch.amin)(x_MK, dim=1, keepdim=True)
    x_MK.scatter_(1, place_M1, first_M1)
    zero = torch.zeros(())
    side(flipped_MK, side(first_M1, zero), out=flipped_MK)
    return flipped_MK.scatter_(1, place_M1, side(-first_M1, side(second_M1, zero)))


def _squares(x_MK: Tensor, token_M: Tensor) -> float:
    range_M = x_MK.amax(dim=1).clamp(min=0) - x_MK.amin(dim=1).clamp(max=0)
    return float(token_M @ range_M.square())
