"""What a stream of rollouts asks of the models of its run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penjing.train.align.sampler import AnySampler
from penjing.train.objective.objective import Batch
from penjing.train.objective.policy import answer_inputs


@dataclass
class Learner:
    """What the task gives its streams once the model is there: who answers, whose probabilities are asked for, and
    whose logits are learnt from."""

    model: nn.Module
    sampler: AnySampler
    reference: nn.Module | None = None
    teacher: nn.Module | None = None

    @torch.no_grad()
    def taught(self, batch: Batch) -> Batch:
        """`batch` with the logits of the teacher, if there is one."""
        if self.teacher is None:
            return batch
        return batch | {"teacher": self.teacher(**_inputs(batch, self.teacher))}

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """(R, E): what the decoder below a draft network makes of `batch`; the same after an update."""
        return self.model(**_inputs(batch, self.model), only_states=True)


def _inputs(batch: Batch, model: nn.Module) -> Batch:
    device = next(model.parameters()).device
    return {name: each.to(device) for name, each in answer_inputs(batch).items()}
