"""What a model learns from a teacher on answers that it has sampled itself: at each token, the teacher's whole
distribution.

The batch is that of `penjing.train.objective.policy`, where "advantage" and "silent" are not looked at, and "reward"
may be missing; "teacher" (R, V) floating are the teacher's logits before each token of the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penjing.train.objective.cross_entropy import row_blocks
from penjing.train.objective.logprobs import token_logprobs
from penjing.train.objective.objective import Batch, Loss
from penjing.train.objective.policy import (
    Aggregate,
    answer_inputs,
    answer_metrics,
    answer_sums,
    count_of,
    token_weights,
    weighted_mean,
)

Divergence = Literal["reverse", "forward"]


@dataclass(frozen=True)
class OnPolicyDistillation:
    """On-policy distillation (https://arxiv.org/abs/2306.13649): the divergence of the model from a teacher, token by
    token, on the model's own answers, which are taken as given.

    Attributes:
        divergence: "reverse", KL(model ‖ teacher), which leaves out what the teacher would not say; or "forward",
            KL(teacher ‖ model), which covers all that it would.
        aggregate: what the loss is a mean of; see `PolicyGradient`.
        most: tokens that an answer has at most.
        temperature: that both are divided by.
    """

    divergence: Divergence = "reverse"
    aggregate: Aggregate = "token"
    most: int = 1
    temperature: float = 1.0

    def count(self, batch: Batch) -> int:
        """The tokens of the answers that count, or these answers."""
        return count_of(self.aggregate, batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        logits = model(**answer_inputs(batch))
        each = divergences(logits, batch["teacher"], self.divergence, self.temperature)
        real = batch["real"].to(each.dtype)
        weights = token_weights(self.aggregate, answer_sums(torch.ones_like(each), batch), self.most)
        with torch.no_grad():
            found, entropy = token_logprobs(logits, batch["next"], self.temperature)
            counted = answer_metrics(batch, entropy) | {"divergence": weighted_mean(each, real[batch["answer"]])}
            if "engine" in batch:
                counted["gap"] = weighted_mean((found - batch["engine"]).abs(), real[batch["answer"]])
        return Loss((each * (real * weights)[batch["answer"]]).sum(), counted=counted)

    def evaluation(self) -> OnPolicyDistillation:
        """The same, of the likeliest answers to held-out prompts."""
        return self


def divergences(logits_NV: Tensor, teacher_NV: Tensor, kind: Divergence, temperature: float = 1.0) -> Tensor:
    """KL divergence of each row in nats, (N,) float32 or the wider type of the logits; differentiable once, by the
    first.

    Args:
        logits_NV: (N, V) floating, of the model.
        teacher_NV: of the teacher.
    """
    return _Divergences.apply(logits_NV, teacher_NV, kind, temperature)  # pyright: ignore[reportReturnType]


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, kind: Divergence, temperature: float) -> Tensor:
        precise = torch.promote_types(logits.dtype, torch.float32)
        found = torch.empty(len(logits), dtype=precise, device=logits.device)
        for rows in row_blocks(logits):
            mine, theirs = ((each[rows].to(precise) / temperature).log_softmax(-1) for each in (logits, teacher))
            over, under = (mine, theirs) if kind == "reverse" else (theirs, mine)
            found[rows] = (over.exp() * (over - under)).sum(-1)
        ctx.save_for_backward(logits, teacher, found)
        ctx.kind, ctx.temperature = kind, temperature
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, teacher, found = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in row_blocks(logits):
            mine, theirs = (
                (each[rows].to(found.dtype) / ctx.temperature).log_softmax(-1) for each in (logits, teacher)
            )
            if ctx.kind == "reverse":  # dD / dlogit = p (log p − log q − D)
                wide = mine.exp() * (mine - theirs - found[rows, None])
            else:  # dD / dlogit = p − q
                wide = mine.exp() - theirs.exp()
            result[rows] = wide.mul_((gradient[rows] / ctx.temperature)[:, None])
        return result, None, None, None
