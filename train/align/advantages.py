"""How much better an answer is than its siblings, the other answers to the same prompt: what it is learnt with."""

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
