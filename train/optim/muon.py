"""Muon for the matrices inside a network and AdamW for all else, as one optimiser.

Muon (Jordan, https://kellerjordan.github.io/posts/muon/) makes each matrix's momentum nearly orthogonal before it is
added. It is meant for matrices between hidden vectors: embeddings, the last layer, vectors and convolutions go to
AdamW. Updates are scaled so that their root mean square is AdamW's (Liu et al., https://arxiv.org/abs/2502.16982), and
one learning rate suits both. The arithmetic is torch's.
"""

from __future__ import annotations

import fnmatch
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon over the groups that say `"muon": True`, torch.optim.AdamW over the others; they share
    `param_groups` and `state`, so that whoever saves, loads or sets the learning rate sees one optimiser."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        learning_rate: float,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
    ) -> None:
        super().__init__(groups, {"lr": learning_rate})
        self._parts: list[torch.optim.Optimizer] = []
        for is_muon in (True, False):
            if not (mine := [group for group in self.param_groups if group["muon"] == is_muon]):
                continue
            if is_muon:
                part: torch.optim.Optimizer = torch.optim.Muon(
                    mine, learning_rate, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
                )
            else:
                part = torch.optim.AdamW(mine, learning_rate, betas, eps, fused=fused)
            part.state = self.state
            self._parts.append(part)
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Update all parameters that have gradients."""
        assert closure is None, "losses are computed by the loop"
        for part in self._parts:
            part.step()


def takes_muon(name: str, parameter: nn.Parameter, excluded: tuple[str, ...]) -> bool:
    """Whether Muon is meant for a parameter: a matrix whose name matches none of the patterns `excluded`."""
    return parameter.dim() == 2 and not any(fnmatch.fnmatch(name, pattern) for pattern in excluded)
