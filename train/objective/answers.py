"""What a decoder that sees learns: the next token of its answers."""

from __future__ import annotations

import torch
from torch import nn

from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED, Batch, Loss


class Answers:
    """Cross-entropy of the tokens of answers.

    Batches have "tokens" (B, T), "images" (N, C, H, W), "seen" (M,), which of the images each run of image tokens
    stands for, and for each of R tokens to learn: "rows" (R,), the place in
    the flattened tokens from which it follows; "targets" (R,), the token, `IGNORED` counting for nothing; and "sample"
    (R,), which of the B it is of. Evaluations also tell `exact`, the share of samples of which every token is the
    likeliest one: what greedy decoding answers exactly.
    """

    def count(self, batch: Batch) -> int:
        """The targets that are not ignored."""
        return int((batch["targets"] != IGNORED).sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        logits = model(batch["tokens"], batch["images"], logit_rows=batch["rows"], seen=batch["seen"])
        targets = batch["targets"]
        total = cross_entropy_sum(logits, targets, ignored=IGNORED)
        with torch.no_grad():
            counted = targets != IGNORED
            right = (logits.argmax(-1) == targets) & counted
            zeros = torch.zeros(len(batch["tokens"]), device=targets.device)
            wrong = zeros.index_add(0, batch["sample"], (counted & ~right).to(zeros.dtype))
            real = zeros.index_add(0, batch["sample"], counted.to(zeros.dtype)) > 0
            exact = ((wrong == 0) & real).sum().to(torch.float32)
        return Loss(total, {"accuracy": right.sum().to(torch.float32)}, {"exact": (exact, real.sum())})

    def evaluation(self) -> Answers:
        """The same."""
        return self
