"""Load balancing of a mixture of experts, by an auxiliary loss, by router biases, or by both.

The auxiliary loss (Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4) is taken layer by layer, over the
tokens of a micro-batch that have a target. Router biases (https://arxiv.org/abs/2408.15664, DeepSeek-V3) change the
choice of experts only, not their weights: after each update the bias of every expert that got more than its share of
the whole step's tokens, over all processes, goes down by `bias_rate`, that of the others up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from pydantic import Field
from torch import nn

from penjing.core.config import Config
from penjing.core.models.moe import MoE, Routing, watch_routing
from penjing.train.objective import IGNORED, Batch, CrossEntropy, Loss
from penjing.train.world import World


class BalancingConfig(Config):
    """`auxiliary_loss`: its weight beside the loss (1e-2 in Switch, 1e-3 in Qwen). `bias_rate`: what a router's bias
    moves a step (1e-3 in DeepSeek-V3). 0: not used."""

    auxiliary_loss: float = Field(default=0.0, ge=0)
    bias_rate: float = Field(default=0.0, ge=0)


def balance_loss(routing: Routing, counted_T: torch.Tensor | None = None) -> torch.Tensor:
    """experts × Σ (share of tokens that chose an expert) × (mean probability of the expert): a float32 scalar.

    It is `num_experts_per_tok` when the load is even, and grows as it gathers on few. transformers'
    load_balancing_loss_func gives the same for one layer; it pools several, which lets the crowd of one hide behind
    that of another.

    Args:
        counted_T: (T,) bool, the tokens that count; all when None.
    """
    probabilities = routing.probabilities
    if counted_T is None:
        counted_T = torch.ones_like(probabilities[:, 0], dtype=torch.bool)
    count = counted_T.sum().clamp(min=1)
    mean_N = (probabilities * counted_T[:, None]).sum(0) / count
    return probabilities.shape[1] * (routing.load(counted_T) / count * mean_N).sum()


class Balanced:
    """An objective of a decoder with experts: `objective` plus the auxiliary loss, with the experts' load as metrics.

    `language_loss` and `balance_loss` are the parts; `expert_load_max` and `expert_load_min` the load of the busiest
    and the idlest expert of any layer, against its even share (1.0). No token is ever dropped.
    """

    def __init__(self, objective: CrossEntropy, config: BalancingConfig) -> None:
        self.objective = objective
        self.config = config
        self._step_loads: list[torch.Tensor] | None = None  # (layers, experts) of each micro-batch of this step

    def count(self, batch: Batch) -> int:
        """See `Objective`."""
        return self.objective.count(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        with watch_routing() as routings:
            loss = self.objective(model, batch)
        counted_T = (batch["targets"] != IGNORED).flatten()
        count = counted_T.sum()
        balance = torch.stack([balance_loss(routing, counted_T) for routing in routings]).mean()
        loads_LN = torch.stack([routing.load(counted_T) for routing in routings])
        if self._step_loads is not None and torch.is_grad_enabled():
            self._step_loads.append(loads_LN)
        relative_LN = loads_LN / loads_LN.mean(1, keepdim=True).clamp(min=1e-9)
        metrics = {
            "language_loss": loss.total.detach(),
            "balance_loss": balance.detach() * count,
            "expert_load_max": relative_LN.amax() * count,
            "expert_load_min": relative_LN.amin() * count,
        }
        total = loss.total + self.config.auxiliary_loss * count * balance if self.config.auxiliary_loss else loss.total
        return Loss(total, {**loss.metrics, **metrics})

    def evaluation(self) -> CrossEntropy:
        """The plain objective that held-out data is judged by."""
        return self.objective.evaluation()

    def bias_update(self, model: nn.Module, world: World) -> Callable[[int], None]:
        """What to call after each update: it moves the routers' biases of `model`, alike in every process."""
        biases = [module.e_score_correction_bias for module in model.modules() if isinstance(module, MoE)]
        loads = self._step_loads = []

        @torch.no_grad()
        def update(step: int) -> None:
            loads_LN = world.sum(torch.stack(loads).sum(0))
            loads.clear()
            moves_LN = self.config.bias_rate * torch.sign(loads_LN.mean(1, keepdim=True) - loads_LN)
            for bias, move_N in zip(biases, moves_LN, strict=True):
                bias += move_N

        return update
