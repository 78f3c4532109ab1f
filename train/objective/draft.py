"""What a draft network learns: to guess, behind each token of an answer, what the model goes on with.

The batch is that of `penjing.train.objective.policy`, where only "tokens", "rows", "next", "answer" and "real" are
learnt from; "states" (R, E) floating, the model's last hidden states at the rows, may be there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penjing.train.objective.objective import Batch, Loss
from penjing.train.objective.policy import answer_inputs, count_of, weighted_mean


@dataclass(frozen=True)
class DraftDistillation:
    """Cross-entropy of each guess with the model's own probabilities of the known tokens, on answers of the model.

    `tokens_a_step` counts what a step of the model would give that checks all guesses: the token that it finds itself,
    and the guesses up to the first one that the answer did not go on with.

    Attributes:
        guesses: how many tokens ahead.
        temperature: that the model's logits are divided by.
    """

    guesses: int = 3
    temperature: float = 1.0

    def count(self, batch: Batch) -> int:
        """The tokens of the answers that count."""
        return count_of("token", batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class; `model` is a `Drafted`."""
        following, owner = batch["next"], batch["answer"]
        found = model(
            **answer_inputs(batch), following=following, owner=owner, guesses=self.guesses, states=batch.get("states"),
        )  # fmt: skip
        real = batch["real"][owner].float()
        total = torch.zeros((), device=real.device)
        came, taken = torch.ones_like(real), torch.zeros_like(real)
        counted: dict[str, tuple[Tensor, Tensor]] = {}
        for ahead, guess in enumerate(found, start=1):
            weight = real * guess.inside_N
            wanted = (guess.wanted_NK.float() / self.temperature).softmax(-1)
            each = -(wanted * guess.logits_NK.float().log_softmax(-1)).sum(-1)
            total = total + (each * weight).sum()
            with torch.no_grad():
                right = guess.likeliest_N == following.roll(-ahead)
                came = came * (right & guess.inside_N)
                taken += came
                counted[f"guessed_{ahead}"] = weighted_mean(right.float(), weight)
        counted["tokens_a_step"] = weighted_mean(1 + taken, real)
        ends = batch["real"].float()
        counted["ended"] = weighted_mean(batch["ended"], ends)
        counted["length"] = (real.sum(), ends.sum())
        return Loss(total, counted=counted)

    def evaluation(self) -> DraftDistillation:
        """The same, of the likeliest answers to held-out prompts."""
        return self
