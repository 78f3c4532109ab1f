"""How much better an answer is than its siblings, the other answers to the same prompt, or than what a learnt value
expected: what it is learnt with."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.train.objective.policy import Scale

_TINY = 1e-4  # added to a deviation: TRL's


def group_advantages(rewards_PS: Tensor, scale: Scale = "group") -> Tensor:
    """GRPO (https://arxiv.org/abs/2402.03300): each reward less the mean of its group, over a deviation.

    Args:
        rewards_PS: (prompts, samples) floating, at least 2 samples.
        scale: "group": of the group; "batch": of all rewards; "none": not divided (https://arxiv.org/abs/2503.20783).

    Returns:
        (P, S), zero in a group of equal rewards.
    """
    centred = rewards_PS - rewards_PS.mean(1, keepdim=True)
    # The mean of equal numbers need not be one of them, and rounding must not teach anything.
    centred = torch.where(rewards_PS == rewards_PS[:, :1], 0.0, 1.0).amax(1, keepdim=True) * centred
    if scale == "none":
        return centred
    deviation = rewards_PS.std() if scale == "batch" else rewards_PS.std(1, keepdim=True)
    return centred / (deviation + _TINY)


def leave_one_out(rewards_PS: Tensor, scale: Scale = "none") -> Tensor:
    """RLOO (https://arxiv.org/abs/2402.14740): each reward less the mean of the others of its group.

    Args:
        rewards_PS: (prompts, samples) floating, at least 2 samples.
        scale: "batch": less the mean of all advantages, over their deviation; or "none".

    Returns:
        (P, S), zero in a group of equal rewards where nothing is divided.
    """
    samples = rewards_PS.shape[1]
    advantages = group_advantages(rewards_PS, "none") * (samples / (samples - 1))
    if scale == "batch":
        return (advantages - advantages.mean()) / (advantages.std() + _TINY)
    return advantages


def generalized_advantages(
    rewards_PSL: Tensor, values_PSL: Tensor, sizes_PS: Tensor, discount: float, trace: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (https://arxiv.org/abs/1506.02438): what came of each token, beyond what the
    value before it expected.

    Args:
        rewards_PSL: (prompts, samples, tokens), for each token of the answers.
        values_PSL: what was expected before it.
        sizes_PS: tokens of each answer; what stands behind them is not looked at.

    Returns:
        Advantages and returns, advantages + values, (P, S, L), zero behind the answers.
    """
    real = answer_mask(sizes_PS, rewards_PSL.shape[-1])
    rewards, values = (torch.where(real, each, 0.0) for each in (rewards_PSL, values_PSL))
    advantages, after, ahead = torch.zeros_like(rewards), rewards.new_zeros(sizes_PS.shape), None
    for place in reversed(range(rewards.shape[-1])):
        expected = 0.0 if ahead is None else discount * ahead
        after = rewards[..., place] + expected - values[..., place] + discount * trace * after
        after = torch.where(real[..., place], after, 0.0)
        advantages[..., place], ahead = after, values[..., place]
    return advantages, torch.where(real, advantages + values, 0.0)


def whitened(advantages_PSL: Tensor, sizes_PS: Tensor) -> Tensor:
    """Advantages of tokens less their mean over all answers, over their deviation; zero where all are equal."""
    real = answer_mask(sizes_PS, advantages_PSL.shape[-1])
    found = advantages_PSL[real]
    if bool((found == found[:1]).all()):
        return torch.zeros_like(advantages_PSL)
    return torch.where(real, (advantages_PSL - found.mean()) * torch.rsqrt(found.var() + 1e-8), 0.0)


def answer_mask(sizes_PS: Tensor, width: int) -> Tensor:
    """(P, S, width) bool, which places of the answers have a token."""
    return torch.arange(width) < sizes_PS[..., None]
