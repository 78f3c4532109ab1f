"""What a model learns from answers that it has sampled itself, each weighed by how much better it was than others.

The batch is one of B answers: "tokens" (1, T) int64, each prompt once and the answers to it behind it; "paths" (B, W)
int64, which of the tokens each prompt and answer is made of, as `positions_and_attention` takes them, without which
"tokens" is (B, T) with a prompt and an answer in each row; "rows" (R,) int64, the places in the flattened tokens that
a token of an answer follows, "next" (R,) int64, that token, and "answer" (R,) int64, the answer of each; "advantage",
"reward", "ended" and "silent", of a group of equal rewards, (B,) float32; "real" (B,) bool, which answers count. Where
there is "asked" (B,) float32, "reward", "ended" and "gold" are sums over so many answers, with those that were given
first and replaced. "old", "reference" and "engine" (R,) float32, the tokens' log-probabilities before the first update
from these answers, by the reference and by the engine that sampled them, may be there; and "gold" (B,) float32, rewards
that are only recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from penjing.train.objective.logprobs import token_logprobs
from penjing.train.objective.objective import Batch, Loss

Aggregate = Literal["token", "answer", "constant"]
Scale = Literal["group", "batch", "none"]  # what advantages are divided by


@dataclass(frozen=True)
class PolicyGradient:
    """The clipped policy gradient (https://arxiv.org/abs/1707.06347) with a penalty for leaving a reference.

    With the ratio r of a token's probability to the one that it was sampled with and the answer's advantage A, a token
    costs −min(r A, clamp(r, 1 − low, 1 + high) A) + kl × (exp(d) − d − 1) − entropy × H, where d is the reference's
    log-probability less the model's and H the model's entropy there. Without "old" in the batch, r is 1 and the
    gradient is that of REINFORCE.

    Attributes:
        clip: low and high.
        dual: the largest r of what is not clamped; bounds the loss of negative advantages. None: not bounded.
        kl: weight of the penalty.
        entropy: weight of a reward for the entropy of the model before each token.
        whole: r is of the whole answer, the product of its tokens' ratios, as in RLOO; there is no penalty then.
        aggregate: what the loss is a mean of: "token", all tokens of the step (DAPO); "answer", the answers' means
            (GRPO); "constant", the answers' sums over `most` (Dr. GRPO). Of whole answers: "answer".
        most: tokens that an answer has at most.
        temperature: that the answers were sampled with.
    """

    clip: tuple[float, float] = (0.2, 0.2)
    dual: float | None = None
    kl: float = 0.0
    entropy: float = 0.0
    whole: bool = False
    aggregate: Aggregate = "token"
    most: int = 1
    temperature: float = 1.0

    def count(self, batch: Batch) -> int:
        """The tokens of the answers that count, or these answers."""
        return count_of(self.aggregate, batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        found, entropy = answer_tokens(model, batch, self.temperature)
        owner, sizes = batch["answer"], answer_sums(torch.ones_like(found), batch)
        real = batch["real"].to(found.dtype)
        log_ratio = found - batch["old"] if "old" in batch else found - found.detach()
        advantage = batch["advantage"]
        if self.whole:
            log_ratio = answer_sums(log_ratio, batch)
        else:
            advantage = advantage[owner]
        each, clipped = clipped_cost(log_ratio.exp(), advantage, self.clip, self.dual)
        away = None
        if "reference" in batch:
            ahead = batch["reference"] - found
            away = ahead.exp() - ahead - 1
            if self.kl and not self.whole:
                each = each + self.kl * away
        if self.entropy and not self.whole:
            each = each - self.entropy * entropy
        weight = real if self.whole else real[owner] * token_weights(self.aggregate, sizes, self.most)[owner]
        with torch.no_grad():
            counts = real if self.whole else real[owner]
            counted = answer_metrics(batch, entropy)
            counted |= {"clipped": weighted_mean(clipped, counts), "silent": weighted_mean(batch["silent"], real)}
            if away is not None:
                counted["kl"] = weighted_mean(distance(found, batch), real[owner])
            if "engine" in batch:
                counted["gap"] = weighted_mean((found - batch["engine"]).abs(), real[owner])
        return Loss((each * weight).sum(), counted=counted)

    def evaluation(self) -> AnswerRewards:
        """Held-out prompts are judged by the rewards of their answers."""
        return AnswerRewards()


@dataclass(frozen=True)
class AnswerRewards:
    """The rewards of answers, whose mean with the sign turned is the loss; the model is asked for its entropy."""

    def count(self, batch: Batch) -> int:
        """The answers that count."""
        return int(batch["real"].sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        _, entropy = answer_tokens(model, batch)
        metrics = answer_metrics(batch, entropy)
        return Loss(-metrics["reward"][0], counted=metrics)


def answer_tokens(model: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The log-probability of each token of the answers and the entropy before it, each (R,) float32."""
    logits = model(**answer_inputs(batch))
    return token_logprobs(logits, batch["next"], temperature)


def answer_inputs(batch: Batch) -> dict[str, Tensor]:
    """What a decoder is given for logits of the answers' tokens, and of no others."""
    shared = {"paths": batch["paths"]} if "paths" in batch else {}
    return {"token_ids": batch["tokens"], "logit_rows": batch["rows"]} | shared


def count_of(aggregate: Aggregate, batch: Batch) -> int:
    """What a loss is a mean of: the tokens of the answers that count, or these answers."""
    return int((batch["real"][batch["answer"]] if aggregate == "token" else batch["real"]).sum())


def token_weights(aggregate: Aggregate, sizes_B: Tensor, most: int) -> Tensor:
    """(B,), what a token of each answer weighs in the sum of the loss."""
    if aggregate == "token":
        return torch.ones_like(sizes_B)
    return 1 / sizes_B if aggregate == "answer" else torch.full_like(sizes_B, 1 / most)


def clipped_cost(
    ratio: Tensor, advantage: Tensor, clip: tuple[float, float], dual: float | None
) -> tuple[Tensor, Tensor]:
    """What each ratio costs, and which lie beyond `clip` so that nothing is learnt of them; see `PolicyGradient`."""
    low, high = clip
    free = ratio if dual is None else ratio.clamp(max=dual)
    cost = -torch.minimum(free * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    with torch.no_grad():
        beyond = ((ratio < 1 - low) & (advantage < 0)) | ((ratio > 1 + high) & (advantage > 0))
    return cost, beyond


@torch.no_grad()
def distance(logprobs_R: Tensor, batch: Batch) -> Tensor:
    """(R,), of which the mean estimates how far the model is from the reference, in nats a token.

    With the log-ratio d of the reference to the model it is exp(d) − d − 1, which is right of tokens that the model
    samples. After an update from the same answers it samples others, so each counts by how much likelier the model
    makes it than when it was sampled. Without that, a token that has become rare would count exp(d), however large.
    """
    ahead = batch["reference"] - logprobs_R
    away = ahead.exp() - ahead - 1
    return away * (logprobs_R - batch["old"]).exp() if "old" in batch else away


def answer_sums(values_R: Tensor, batch: Batch) -> Tensor:
    """(B,), the sum of each answer's tokens."""
    answers = len(batch["real"])
    return torch.zeros(answers, dtype=values_R.dtype, device=values_R.device).index_add(0, batch["answer"], values_R)


def weighted_mean(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """A weighted sum, and the sum of the weights."""
    return (values.to(weights.dtype) * weights).sum(), weights.sum()


@torch.no_grad()
def answer_metrics(batch: Batch, entropy_R: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """(Sum, count) of what is recorded of all answers, whatever they are learnt with."""
    real = batch["real"].to(entropy_R.dtype)
    asked = (real * batch["asked"] if "asked" in batch else real).sum()
    known = [name for name in ("reward", "ended", "gold") if name in batch]
    of_answers = {name: (weighted_mean(batch[name], real)[0], asked) for name in known}
    if "asked" in batch:
        of_answers["asked"] = weighted_mean(batch["asked"], real)
    return of_answers | {
        "length": weighted_mean(answer_sums(torch.ones_like(entropy_R), batch), real),
        "entropy": weighted_mean(entropy_R, real[batch["answer"]]),
    }
