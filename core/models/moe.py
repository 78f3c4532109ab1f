"""Mixture of experts: a router sends each token to a few of many MLPs.

Tokens are sorted by expert, so each expert is one call on its own rows: no capacity, and no token is dropped. Shapes: T
tokens, E hidden, N experts, K of them for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penjing.core.layers.settings import MoEConfig
from penjing.core.models.mlp import MLP
from penjing.core.models.norm import RMSNorm
from penjing.kernels.dispatch import gpu_kernels
from penjing.kernels.moe import experts_mlp, one_by_one, sorted_by_expert


@dataclass(frozen=True)
class Routing:
    """One MoE layer's choice for T tokens, in the order of the flattened input.

    Attributes:
        probabilities: (T, N) float32, the scores as shares of one; differentiable.
        experts: (T, K) int64, the experts of each token, the best first.
    """

    probabilities: Tensor
    experts: Tensor

    def load(self, counted_T: Tensor | None = None) -> Tensor:
        """(N,) float32: how many of the `counted_T` (bool; all when None) tokens each expert got."""
        chosen_TK = torch.ones_like(self.experts, dtype=torch.float32)
        if counted_T is not None:
            chosen_TK *= counted_T[:, None]
        load_N = chosen_TK.new_zeros(self.probabilities.shape[1])
        return load_N.index_add(0, self.experts.flatten(), chosen_TK.flatten())


_watchers: list[list[Routing]] = []


@contextmanager
def watch_routing() -> Iterator[list[Routing]]:
    """Collect the `Routing` of every MoE layer that runs inside, in their order.

    Leave it before the backward pass: blocks that are recomputed there would route once more.
    """
    seen: list[Routing] = []
    _watchers.append(seen)
    try:
        yield seen
    finally:
        _watchers.pop()


Compute = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x_TE, weight_TK, expert_TK) → (T, E)


class Experts(nn.ModuleList):
    """The routed experts of one layer: the weighted sum of the outputs of each token's experts.

    Attributes:
        here: which of the experts are in this model; the others are placeholders that keep the names.
        exchange: given from outside when not all are here: it takes the tokens to where their experts are, calls what
            it is given with the tokens that came, and brings the outputs back.
    """

    def __init__(self, hidden: int, config: MoEConfig):
        sizes = hidden, config.moe_intermediate_size, config.biases
        super().__init__(MLP(*sizes, activation=config.activation) for _ in range(config.num_experts))
        self._usual = not config.biases and config.activation == "silu"
        self.here = range(config.num_experts)
        self.exchange: Callable[[Tensor, Tensor, Tensor, Compute], Tensor] | None = None

    def forward(self, x_TE: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """(T, E), (T, K) floating and (T, K) int64 → (T, E)."""
        dtype = self._compute_dtype(x_TE)
        if self.exchange is not None:
            return self.exchange(x_TE.to(dtype) if self._plain() else x_TE, weight_TK, expert_TK, self.compute)
        return self.compute(x_TE, weight_TK, expert_TK)

    def compute(self, x_TE: Tensor, weight_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """`forward` for the experts that are here, of which the first is number 0."""
        experts, dtype = [self[index] for index in self.here], self._compute_dtype(x_TE)
        if dtype != torch.float32 and len(x_TE) and gpu_kernels("moe", x_TE) is not None and self._plain():
            weights = (
                [expert.get_parameter(f"{name}.weight").to(dtype) for expert in experts]
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            return experts_mlp(x_TE.to(dtype), weight_TK, expert_TK, *weights)
        sizes = self._sizes(expert_TK)

        def outputs(x_RE: Tensor) -> Tensor:
            return one_by_one(x_RE, sizes, lambda index, part: experts[index](part))

        return sorted_by_expert(x_TE, weight_TK, expert_TK, outputs)

    def _compute_dtype(self, x_TE: Tensor) -> torch.dtype:
        device = x_TE.device.type
        if x_TE.is_meta:  # autocast does not know the device
            return x_TE.dtype
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TE.dtype

    def _plain(self) -> bool:
        """Every expert is an MLP as it was made, without biases: not quantized, and with no format of its own."""
        parts = (part for index in self.here for part in self[index].modules())
        return self._usual and all(type(part) in (MLP, nn.Linear) for part in parts)

    def _sizes(self, expert_TK: Tensor) -> list[int]:
        """Rows of each expert."""
        num_experts = len(self.here)
        if expert_TK.is_meta or isinstance(expert_TK, FakeTensor):  # no data, to estimate memory: as if balanced
            each, rest = divmod(expert_TK.numel(), num_experts)
            return [each + (index < rest) for index in range(num_experts)]
        return expert_TK.flatten().bincount(minlength=num_experts).tolist()


class MoE(nn.Module):
    """Routed experts and, where there are any, shared ones: (…, E) → (…, E)."""

    def __init__(self, hidden: int, config: MoEConfig, eps: float = 1e-6):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(hidden, config.num_experts, bias=config.biases)
        self.experts = Experts(hidden, config)
        if config.router_bias:  # no gradient: load balancing sets it
            self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        if config.shared_expert_intermediate_size:
            activation = "gelu_tanh" if config.activation == "gelu_tanh" else "silu"
            self.shared_experts = MLP(hidden, config.shared_expert_intermediate_size, activation=activation)
        if config.output_norms:
            self.experts_output_norm, self.shared_output_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        if config.shared_expert_gate:
            self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x_TE = x.flatten(0, -2)
        weight_TK, expert_TK = self.route(x_TE)
        y_TE = self.experts(x_TE, weight_TK, expert_TK)
        if self.config.shared_expert_intermediate_size:
            shared_TE = self.shared_experts(x_TE)
            if self.config.shared_expert_gate:
                shared_TE = _sigmoid(self.shared_expert_gate(x_TE)) * shared_TE
            if self.config.output_norms:
                y_TE, shared_TE = self.experts_output_norm(y_TE), self.shared_output_norm(shared_TE)
            y_TE = y_TE + shared_TE
        return y_TE.view(x.shape)

    def route(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(T, K) float32 weights and int64 experts of each token."""
        config = self.config
        logits_TN = self.gate(x_TE).to(torch.float32)
        softmax = config.scoring_func != "sigmoid"
        score_TN = logits_TN.softmax(-1) if softmax else _sigmoid(logits_TN)
        if config.scoring_func == "sparsemixer":
            weight_TK, expert_TK = _sparsemixer(logits_TN, 2 * config.router_jitter_noise)
        else:
            weight_TK, expert_TK = self._largest(logits_TN, score_TN)
        if _watchers or torch.is_grad_enabled():  # unwatched too: a recomputed block must repeat every operation
            share_TN = score_TN if softmax else score_TN / (score_TN.sum(-1, keepdim=True) + 1e-20)
            if _watchers:
                _watchers[-1].append(Routing(share_TN, expert_TK))
        return weight_TK * config.routed_scaling_factor, expert_TK

    def _largest(self, logits_TN: Tensor, score_TN: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        choice_TN = (logits_TN if config.router_bias_of == "logits" else score_TN).detach()
        if config.router_bias:
            choice_TN = choice_TN + self.e_score_correction_bias
        if config.n_group > 1:
            choice_TN = self._within_groups(choice_TN)
        expert_TK = choice_TN.topk(config.num_experts_per_tok, dim=-1).indices
        weight_TK = score_TN.gather(-1, expert_TK)
        if config.norm_topk_prob:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        return weight_TK, expert_TK

    def _within_groups(self, choice_TN: Tensor) -> Tensor:
        """Minus infinity for experts outside the best `topk_group` groups. A group is as good as its best expert under
        softmax (DeepSeek-V2), as its two best together under sigmoid scores (DeepSeek-V3)."""
        config = self.config
        choice_TGN = choice_TN.unflatten(-1, (config.n_group, -1))
        best = 1 if config.scoring_func == "softmax" else 2
        group_TG = choice_TGN.topk(best, dim=-1).values.sum(-1)
        kept = group_TG.topk(config.topk_group, dim=-1).indices
        outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter(-1, kept, False)
        return choice_TGN.masked_fill(outside_TG[..., None], -torch.inf).flatten(-2)


def _sparsemixer(logits_TN: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """The largest logit and the largest of the others, each weighed by a softmax of those that lie less than `margin`
    below it, as a share of what is larger (https://arxiv.org/abs/2409.12136, as it infers): (T, 2) both. Training by
    it differs from that paper: nothing is drawn."""
    weights: list[Tensor] = []
    experts: list[Tensor] = []
    left_TN = logits_TN
    for _ in range(2):
        most_T1, expert_T1 = left_TN.detach().max(-1, keepdim=True)
        far_TN = (most_T1 - logits_TN.detach()) / logits_TN.detach().abs().clamp(min=most_T1) > margin
        weights.append(left_TN.masked_fill(far_TN, -torch.inf).softmax(-1).gather(-1, expert_T1))
        experts.append(expert_T1)
        left_TN = left_TN.scatter(-1, expert_T1, -torch.inf)
    return torch.cat(weights, -1), torch.cat(experts, -1)


def keep_out_of_graphs() -> None:
    """Let torch.compile go around the experts: their sizes follow the data, and each new size would compile again."""
    if not getattr(MoE.forward, "_torchdynamo_disable", False):
        MoE.forward = torch.compiler.disable(MoE.forward)  # pyright: ignore[reportAttributeAccessIssue]


def _sigmoid(x: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return x.sigmoid()
    # The vector and the scalar loop of torch's differ in the last bit, so a row would depend on the others.
    return x.neg().exp_().add_(1).reciprocal_()
