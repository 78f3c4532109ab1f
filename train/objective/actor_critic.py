"""What a model learns with a value of its own (PPO): its policy, from how much better each token was than expected,
and what to expect.

The batch is that of `penjing.train.objective.policy`, but "advantage" is (R,), of each token; and there are "return"
(R,) float32, what came of each token, and "value" (R,), what was expected before it when the answers were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penjing.train.objective.logprobs import token_logprobs
from penjing.train.objective.objective import Batch, Loss
from penjing.train.objective.policy import (
    Aggregate,
    AnswerRewards,
    answer_inputs,
    answer_metrics,
    answer_sums,
    clipped_cost,
    count_of,
    distance,
    token_weights,
    weighted_mean,
)


@dataclass(frozen=True)
class ProximalPolicy:
    """Proximal policy optimisation (https://arxiv.org/abs/1707.06347) of an `ActorCritic`.

    With the ratio r of a token's probability to the one that it was sampled with, its advantage A, the value v before
    it, which was w when it was sampled, what came of it R, and the entropy H of the model there, a token costs

        −min(r A, clamp(r, 1 − low, 1 + high) A) + value_weight × ½ max((v − R)², (near − R)²) − entropy × H

    where near is clamp(v, w − c, w + c).

    Without "old" in the batch, r is 1. A penalty for leaving a reference is part of the rewards, see
    `penjing.train.align.rollouts`.

    Attributes:
        clip: low and high.
        dual: the largest r of what is not clamped; None: not bounded.
        value_clip: c.
        aggregate: what the loss is a mean of; see `PolicyGradient`.
        most: tokens that an answer has at most.
        temperature: that the answers were sampled with.
    """

    clip: tuple[float, float] = (0.2, 0.2)
    dual: float | None = None
    value_weight: float = 0.1
    value_clip: float = 0.2
    entropy: float = 0.0
    aggregate: Aggregate = "token"
    most: int = 1
    temperature: float = 1.0

    def count(self, batch: Batch) -> int:
        """The tokens of the answers that count, or these answers."""
        return count_of(self.aggregate, batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        found, entropy, values = valued_tokens(model, batch, self.temperature)
        owner, old = batch["answer"], batch["value"]
        log_ratio = found - batch["old"] if "old" in batch else found - found.detach()
        each, clipped = clipped_cost(log_ratio.exp(), batch["advantage"], self.clip, self.dual)
        near = torch.minimum(torch.maximum(values, old - self.value_clip), old + self.value_clip)
        misses = torch.maximum((values - batch["return"]) ** 2, (near - batch["return"]) ** 2)
        each = each + self.value_weight / 2 * misses
        if self.entropy:
            each = each - self.entropy * entropy
        real = batch["real"].to(found.dtype)
        weights = token_weights(self.aggregate, answer_sums(torch.ones_like(found), batch), self.most)
        with torch.no_grad():
            of_tokens = {"clipped": clipped, "value": values, "value_error": (values - batch["return"]) ** 2}
            if "reference" in batch:
                of_tokens["kl"] = distance(found, batch)
            if "engine" in batch:
                of_tokens["gap"] = (found - batch["engine"]).abs()
            counted = answer_metrics(batch, entropy)
            counted |= {name: weighted_mean(values, real[owner]) for name, values in of_tokens.items()}
        return Loss((each * (real * weights)[owner]).sum(), counted=counted)

    def evaluation(self) -> AnswerRewards:
        """Held-out prompts are judged by the rewards of their answers."""
        return AnswerRewards()


def valued_tokens(model: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probability of each token of the answers, the entropy before it and the reward that is expected there,
    each (R,) float32."""
    logits, values = model(**answer_inputs(batch), valued=True)
    found, entropy = token_logprobs(logits, batch["next"], temperature)
    return found, entropy, values.to(found.dtype)
