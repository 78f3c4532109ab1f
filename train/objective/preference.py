"""What is learnt from pairs of a better and a worse answer: a policy (DPO and its kin), or a model of rewards.

A pair is one term, whatever its length; its log-probabilities are sums over the tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.train.objective.logprobs import token_logprobs
from penjing.train.objective.objective import Batch, Loss


def answer_logprobs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """The log-probability of each answer of a `pair_batch` and its number of tokens, each (B, 2) float32."""
    logits = model(batch["tokens"], logit_rows=batch["rows"])
    tokens, _ = token_logprobs(logits, batch["next"])
    rows = batch["tokens"].shape[0]
    sums = torch.zeros(rows, dtype=tokens.dtype, device=tokens.device).index_add(0, batch["answer"], tokens)
    sizes = torch.zeros_like(sums).index_add(0, batch["answer"], torch.ones_like(tokens))
    return sums.view(-1, 2), sizes.detach().view(-1, 2)


@dataclass(frozen=True)
class DirectPreference:
    """DPO (https://arxiv.org/abs/2305.18290) over `answer_logprobs` and the batch's "reference".

    With z = β × (how much more the model prefers the chosen answer than the reference does), label smoothing ε and the
    two log-ratios c and r:

    - sigmoid: −(1 − ε) log σ(z) − ε log σ(−z) (conservative DPO);
    - sigmoid_norm: the same of log-ratios per token;
    - ipo: (z / β − 1 / 2β)² of log-ratios per token (https://arxiv.org/abs/2310.12036);
    - hinge: max(0, 1 − z) (SLiC, https://arxiv.org/abs/2305.10425);
    - robust: (−(1 − ε) log σ(z) + ε log σ(−z)) / (1 − 2ε) (https://arxiv.org/abs/2403.00409);
    - apo_zero: 1 − σ(βc) + σ(βr) (https://arxiv.org/abs/2408.06266).

    Attributes: sft: weight of the chosen answers' negative log-probability per token.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    sft: float = 0.0

    def count(self, batch: Batch) -> int:
        """The pairs that are there not only to fill a batch up."""
        return int(batch["real"].sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        sums, sizes = answer_logprobs(model, batch)
        ratios = sums - batch["reference"]
        per_token = ratios / sizes
        each = _LOSSES[self.loss](self, ratios, per_token)
        if self.sft:
            each = each - self.sft * sums[:, 0] / sizes[:, 0]
        real = batch["real"]

        def total(values: Tensor) -> Tensor:
            return torch.where(real, values, 0.0).sum()

        with torch.no_grad():
            chosen, rejected = self.beta * ratios[:, 0], self.beta * ratios[:, 1]
            metrics = {
                "preference_accuracy": total((chosen > rejected).to(ratios.dtype)),
                "reward_margin": total(chosen - rejected),
                "chosen_reward": total(chosen),
                "rejected_reward": total(rejected),
                "chosen_change": total(per_token[:, 0]),
            }
        return Loss(total(each), metrics)

    def evaluation(self) -> DirectPreference:
        """The same: pairs of a held-out prompt are judged as they are learnt."""
        return self


def _sigmoid(of: DirectPreference, ratios: Tensor, _: Tensor) -> Tensor:
    z = of.beta * (ratios[:, 0] - ratios[:, 1])
    return -(1 - of.label_smoothing) * F.logsigmoid(z) - of.label_smoothing * F.logsigmoid(-z)


def _hinge(of: DirectPreference, ratios: Tensor, _: Tensor) -> Tensor:
    return torch.relu(1 - of.beta * (ratios[:, 0] - ratios[:, 1]))


def _robust(of: DirectPreference, ratios: Tensor, _: Tensor) -> Tensor:
    z, flipped = of.beta * (ratios[:, 0] - ratios[:, 1]), of.label_smoothing
    return (-(1 - flipped) * F.logsigmoid(z) + flipped * F.logsigmoid(-z)) / (1 - 2 * flipped)


def _apo_zero(of: DirectPreference, ratios: Tensor, _: Tensor) -> Tensor:
    return 1 - torch.sigmoid(of.beta * ratios[:, 0]) + torch.sigmoid(of.beta * ratios[:, 1])


_LOSSES: dict[str, Callable[[DirectPreference, Tensor, Tensor], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": lambda of, _, per_token: _sigmoid(of, per_token, per_token),
    "ipo": lambda of, _, per_token: (per_token[:, 0] - per_token[:, 1] - 1 / (2 * of.beta)) ** 2,
    "hinge": _hinge,
    "robust": _robust,
    "apo_zero": _apo_zero,
}


@dataclass(frozen=True)
class RewardModeling:
    """Bradley–Terry: −log σ(chosen − rejected − margin), plus `centring` × (chosen + rejected)²
    (https://arxiv.org/abs/2203.02155, https://arxiv.org/abs/2312.09244)."""

    centring: float = 0.0

    def count(self, batch: Batch) -> int:
        """The pairs that are there not only to fill a batch up."""
        return int(batch["real"].sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class; `model` is a `RewardModel`."""
        scores = model(batch["tokens"], batch["last"]).to(torch.float32).view(-1, 2)
        difference = scores[:, 0] - scores[:, 1]
        each = -F.logsigmoid(difference - batch["margin"]) + self.centring * scores.sum(-1).square()
        real = batch["real"]

        def total(values: Tensor) -> Tensor:
            return torch.where(real, values, 0.0).sum()

        with torch.no_grad():
            right = (difference > 0).to(torch.float32)
            rows = torch.zeros_like(batch["last"]).index_add(0, batch["answer"], torch.ones_like(batch["answer"]))
            sizes = rows.view(-1, 2).to(torch.float32)
            alike = real & (sizes.amin(-1) >= 0.9 * sizes.amax(-1))  # else length may be all that it has learnt
            metrics = {"preference_accuracy": total(right), "score": total(scores.mean(-1))}
            counted = {"accuracy_of_equal_length": (torch.where(alike, right, 0.0).sum(), alike.sum())}
        return Loss(total(each), metrics, counted)

    def evaluation(self) -> RewardModeling:
        """The same."""
        return self
