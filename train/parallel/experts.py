"""Expert parallelism: each process has some of a layer's experts, and tokens travel to them and back (GShard,
https://arxiv.org/abs/2006.16668).

The processes of a group see different tokens: they are `ep` neighbours of data parallelism. Process r keeps experts
r·N/ep … (r + 1)·N/ep of every layer; everything else of the model is spread over all of data parallelism, the experts
over its other dp / ep processes. In a layer each process tells the others how many rows it has for each expert, sends
the rows, and gets the outputs back: no capacity, no token is dropped, and a process may get none at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from penjing.core.models.moe import Compute, Experts
from penjing.kernels.moe import sorted_by_expert


@dataclass(frozen=True)
class Exchange:
    """What `Experts` is given: number `rank` of the `size` processes of `group`; `num_experts` of a layer in all."""

    rank: int
    size: int
    num_experts: int
    group: dist.ProcessGroup

    @property
    def here(self) -> range:
        """The experts of this process."""
        each = self.num_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def __call__(
        self, x_TE: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """(T, E) → (T, E); all processes of the group call it. `compute` gets the rows for experts that are here."""
        each = len(self.here)
        going_PN = expert_TK.flatten().bincount(minlength=self.num_experts).view(self.size, each)
        coming_PN = _exchange(going_PN, [1] * self.size, [1] * self.size, self.group)
        going, coming = going_PN.sum(1).tolist(), coming_PN.sum(1).tolist()
        # Rows come process after process, each in the order of the experts.
        expert_R = torch.arange(each, device=x_TE.device).repeat(self.size).repeat_interleave(coming_PN.flatten())

        def outputs(x_RE: torch.Tensor) -> torch.Tensor:
            came_RE = _Travel.apply(x_RE, coming, going, self.group)
            y_RE = compute(came_RE, x_RE.new_ones(len(expert_R), 1), expert_R[:, None])  # pyright: ignore[reportArgumentType]
            return _Travel.apply(y_RE, going, coming, self.group)  # pyright: ignore[reportReturnType]

        return sorted_by_expert(x_TE, weight_TK, expert_TK, outputs)


def apply_expert_parallel(model: nn.Module, rank: int, size: int, group: dist.ProcessGroup) -> None:
    """Leave `model` the experts of process `rank` of the `size` of `group`; the others become placeholders."""
    for experts in model.modules():
        if isinstance(experts, Experts):
            experts.exchange = exchange = Exchange(rank, size, len(experts), group)
            experts.here = exchange.here
            for index in set(range(len(experts))) - set(exchange.here):
                experts[index] = nn.Identity()
    model.is_part = True  # pyright: ignore[reportArgumentType]  # see state.py


class _Travel(torch.autograd.Function):
    """(rows, E) → (rows that come, E): `going[p]` consecutive rows to process p, `coming[p]` from it; gradients go the
    way back."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, x_RE: torch.Tensor, coming: list[int], going: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.way = going, coming, group
        return _exchange(x_RE, coming, going, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _exchange(gradients[0], *ctx.way), None, None, None


def _exchange(rows: torch.Tensor, coming: list[int], going: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    return wait_tensor(all_to_all_single(rows.contiguous(), coming, going, group))
