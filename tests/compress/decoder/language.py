"""A language that a tiny decoder learns in seconds."""

from __future__ import annotations

from collections.abc import Callable

import torch


def successors(count: int, seed: int) -> torch.Tensor:
    """(count, 33) tokens of a language in which each token has four successors."""
    follows = torch.randint(3, 320, (320, 4), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, 320, (count,), generator=generator)]
    while len(tokens) < 33:
        tokens.append(follows[tokens[-1], torch.randint(0, 4, (count,), generator=generator)])
    return torch.stack(tokens, 1)


def learn(model: torch.nn.Module, steps: int, rate: float, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        loss(successors(16, step)).backward()
        optimizer.step()
