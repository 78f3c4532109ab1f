"""Load balancing of a mixture of experts, by an auxiliary loss, by router biases, or by both.

The auxiliary loss (Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4) is taken layer by layer, over the
tokens with a target of a micro-batch of all processes together: over those of one alone it would force each sequence
to be balanced in itself (https://arxiv.org/abs/2501.11873). Router biases (https://arxiv.org/abs/2408.15664,
DeepSeek-V3) change the choice of experts only, not their weights: after each update the bias of every expert that got
more than its share of the whole step's tokens, over all processes, goes down by `bias_rate`, that of the others up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import nn

from penjing.core.config import Config
from penjing.core.models.moe import MoE, Routing, watch_routing
from penjing.train.objective.objective import IGNORED, Batch, CrossEntropy, Loss
from penjing.train.processes.world import World
from penjing.train.state.state import local_part


class BalancingConfig(Config):
    """How the experts of a mixture are kept equally busy; see the module."""

    auxiliary_loss: float = Field(
        default=0.0, ge=0, description="Weight of the auxiliary loss (1e-2 in Switch, 1e-3 in Qwen); 0 leaves it out."
    )
    bias_rate: float = Field(
        default=0.0,
        ge=0,
        description="What a router's bias moves in a step (1e-3 in DeepSeek-V3); 0 leaves it as it is.",
    )


def balance_loss(
    routing: Routing, counted_T: torch.Tensor | None = None, share_N: torch.Tensor | None = None
) -> torch.Tensor:
    """experts × Σ (share of tokens that chose an expert) × (mean probability of the expert): a float32 scalar.

    It is `num_experts_per_tok` when the load is even, and grows as it gathers on few. transformers'
    load_balancing_loss_func gives the same for one layer; it pools several, which lets the crowd of one hide behind
    that of another.

    Args:
        counted_T: (T,) bool, the tokens that count; all when None.
        share_N: (N,) float32, the shares of the tokens that chose each expert; of these tokens when None.
    """
    probabilities = routing.probabilities
    if counted_T is None:
        counted_T = torch.ones_like(probabilities[:, 0], dtype=torch.bool)
    count = counted_T.sum().clamp(min=1)
    mean_N = (probabilities * counted_T[:, None]).sum(0) / count
    if share_N is None:
        share_N = routing.load(counted_T) / count
    return probabilities.shape[1] * (share_N * mean_N).sum()


class Balanced:
    """An objective of a decoder with experts: `objective` plus the auxiliary loss, with the experts' load as metrics.

    `language_loss` and `balance_loss` are the parts; `expert_load_max` and `expert_load_min` the load of the busiest
    and the idlest expert of any layer, against its even share (1.0). No token is ever dropped.

    Attributes: world: the processes whose loads are counted together.
    """

    def __init__(self, objective: CrossEntropy, config: BalancingConfig) -> None:
        self.objective = objective
        self.config = config
        self.world = World()
        # Of each stage of the model here (one, but for pipelines), (layers, experts) of each micro-batch of this step
        self._step_loads: defaultdict[int, list[torch.Tensor]] | None = None

    @property
    def takes_parts(self) -> bool:
        """See `CrossEntropy`."""
        return self.objective.takes_parts

    def count(self, batch: Batch) -> int:
        """See `Objective`."""
        return self.objective.count(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class. A model without experts, such as the head of a pipeline, whose stages have a `StageBalancing`
        each, gives the plain loss."""
        with watch_routing() as routings:
            loss = self.objective(model, batch)
        if not routings:
            return loss
        counted_T = (batch["targets"] != IGNORED).flatten()
        count = counted_T.sum()
        loads_LN, balances_L = self.judge(routings, counted_T)
        if torch.is_grad_enabled():
            self.note_loads(0, [loads_LN])
        balance = balances_L.mean()
        most, least = _extremes(loads_LN)
        metrics = {
            "language_loss": loss.total.detach(),
            "balance_loss": balance.detach() * count,
            "expert_load_max": most * count,
            "expert_load_min": least * count,
        }
        total = loss.total + self.config.auxiliary_loss * count * balance if self.config.auxiliary_loss else loss.total
        return Loss(total, {**loss.metrics, **metrics})

    def judge(self, routings: list[Routing], counted_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the layers that `routings` are of, over all processes with other tokens, which all call it: the tokens of
        each expert (layers, experts), and the balance losses (layers,), differentiable in this process's tokens."""
        own_LN = torch.stack([routing.load(counted_T) for routing in routings])
        sums = self.world.sum_tokens(torch.cat([own_LN.flatten(), counted_T.sum()[None].to(own_LN.dtype)]))
        loads_LN, everywhere = sums[:-1].view_as(own_LN), sums[-1].clamp(min=1)
        shares_LN = loads_LN / everywhere
        balances = [balance_loss(one, counted_T, share_N) for one, share_N in zip(routings, shares_LN, strict=True)]
        return loads_LN, torch.stack(balances)

    def note_loads(self, stage: int, loads: list[torch.Tensor]) -> None:
        """Add the loads (layers, experts) of micro-batches to those of this step's layers of `stage`."""
        if self._step_loads is not None:
            self._step_loads[stage].extend(loads)

    def totals(
        self, loss: torch.Tensor, stages: list[StageBalancing], num: int, group: dist.ProcessGroup, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The loss and the metrics of a step of `num` micro-batches through a pipeline, whose processes, `group`, all
        call it: the plain `loss` (of the last), and the `stages` with experts that are here."""
        balance_M, extremes_MC = torch.zeros(num, device=device), torch.full((num, 2), -torch.inf, device=device)
        for stage in stages:
            seen_MC = torch.stack(stage.seen)
            balance_M += seen_MC[:, 0]
            extremes_MC = torch.maximum(extremes_MC, seen_MC[:, 1:])
        dist.all_reduce(balance_M, group=group)
        dist.all_reduce(extremes_MC, dist.ReduceOp.MAX, group=group)
        balance, (most, least) = balance_M.sum(), extremes_MC.sum(0)
        return {
            "loss": loss + self.config.auxiliary_loss * balance.to(loss),
            "language_loss": loss,
            "balance_loss": balance,
            "expert_load_max": most,
            "expert_load_min": -least,
        }

    def evaluation(self) -> CrossEntropy:
        """The plain objective that held-out data is judged by."""
        return self.objective.evaluation()

    def bias_update(self, model: nn.Module, world: World) -> Callable[[int], None]:
        """What to call after each update: it moves the routers' biases of `model`, alike in every process."""
        self.world = world
        biases = [module.e_score_correction_bias for module in model.modules() if isinstance(module, MoE)]
        loads = self._step_loads = defaultdict(list)

        @torch.no_grad()
        def update(step: int) -> None:
            layers = [load_N for stage in sorted(loads) for load_N in torch.stack(loads[stage]).sum(0)]
            loads.clear()
            for bias, load_N in zip(biases, layers, strict=True):
                local, region = local_part(bias)
                local += (self.config.bias_rate * torch.sign(load_N.mean() - load_N))[region]

        return update


class StageBalancing:
    """What `Balanced` does, in one step, for the layers of one stage of a pipeline, whose loss is made elsewhere: the
    auxiliary loss enters the backward pass where its layers are.

    Args:
        stage: its number. num_layers: with experts, in the whole model. factor: the loss's.

    Attributes: seen: of each micro-batch, balance loss, most and least load, times its tokens, the least negative.
    """

    def __init__(self, balanced: Balanced, stage: int, num_layers: int, factor: float) -> None:
        self._balanced = balanced
        self._stage = stage
        self._num_layers = num_layers
        self._factor = factor
        self._tried: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.seen: list[torch.Tensor] = []

    def __call__(self, x: torch.Tensor, routings: list[Routing], counted_T: torch.Tensor) -> torch.Tensor:
        """`x` as it is, the stage's hidden states of a micro-batch with the tokens `counted_T`."""
        loads_LN, balances_L = self._balanced.judge(routings, counted_T)
        count = counted_T.sum()
        balance = count * balances_L.sum() / self._num_layers
        most, least = _extremes(loads_LN)
        self._tried.append((loads_LN, torch.stack([balance.detach(), most * count, -least * count])))
        weight = self._balanced.config.auxiliary_loss
        return _Beside.apply(x, self._factor * weight * balance) if weight else x  # pyright: ignore[reportReturnType]

    def end_pass(self, num: int) -> None:
        """The last `num` micro-batches were a pass; before them, shapes were tried out."""
        loads, seen = zip(*self._tried[-num:], strict=True)
        self._tried.clear()
        self._balanced.note_loads(self._stage, list(loads))
        self.seen.extend(seen)


class _Beside(torch.autograd.Function):
    """`x` as it is; in the backward pass `loss` counts beside what comes after `x`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        dtype, device = ctx.like
        return gradients[0], torch.ones((), dtype=dtype, device=device)


def _extremes(loads_LN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The load of the busiest and the idlest expert of any layer, against its even share."""
    relative_LN = loads_LN / loads_LN.mean(1, keepdim=True).clamp(min=1e-9)
    return relative_LN.amax(), relative_LN.amin()
