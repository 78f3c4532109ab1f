"""What networks that give a tuple of outputs learn from the classes of their samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penjing.core.errors import ConfigError
from penjing.train.objective.mixture import classes_sum
from penjing.train.objective.objective import IGNORED, Batch, Loss

REAL = "real"
"""The entry of a batch, (B,) bool, that says which samples are not there to fill it up."""


def input_name(place: int) -> str:
    """The entry of a batch that holds a network's input of that number."""
    return f"input.{place}"


def inputs_of(batch: Batch) -> tuple[Tensor, ...]:
    """The inputs of a network, in order."""
    return tuple(batch[input_name(place)] for place in range(sum(name.startswith("input.") for name in batch)))


@dataclass(frozen=True)
class Classes:
    """Cross-entropy of the first output (B, classes) against `batch["targets"]`, in float32; see `TaskObjective`."""

    label_smoothing: float = 0.0

    def count(self, batch: Batch) -> int:
        """The samples with a class.

        Raises:
            ConfigError: none has one.
        """
        counted = int((batch["targets"] != IGNORED).sum())
        if not counted and bool(batch[REAL].any()):
            raise ConfigError(
                "the samples have no classes, so that nothing but a teacher can be learnt from; use a step of kind = "
                "'distill', or give data.source with a folder for each class"
            )
        return counted

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See `Objective`."""
        logits, targets = model(*inputs_of(batch))[0], batch["targets"]
        total = classes_sum(logits, batch, ignored=IGNORED, label_smoothing=self.label_smoothing)
        return Loss(total, {"accuracy": (logits.detach().argmax(-1) == targets).sum().to(torch.float32)})

    def evaluation(self) -> Classes:
        """The plain cross-entropy: no smoothing."""
        return Classes()
