"""What a run minimises: an objective is a value that the loop calls, never a branch inside it.

An objective returns the *sum* of its loss over what it counts (tokens, images), not the mean: the loop divides by the
count of the whole step over the whole world, which makes the update independent of accumulation, padding and the
number of processes. The count is asked for before the forward pass, so that the loss is scaled before it enters the
backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import nn

from penjing.core.errors import ConfigError
from penjing.core.models.decoder import Decoder
from penjing.kernels.dispatch import gpu_kernels
from penjing.train.objective.cross_entropy import logits_in_parts
from penjing.train.objective.mixture import classes_sum

Batch = dict[str, torch.Tensor]
IGNORED = -100  # a target with this value counts for nothing (padding)


@dataclass
class Loss:
    """`total`: float32 scalar, the sum of the loss over the counted terms, differentiable.

    `metrics`: name → sum over the counted terms (detached float32 scalar); the loop reports sum / count. `counted`:
    name → (sum, count) of what is counted otherwise, of which it reports sum / count too.
    """

    total: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)
    counted: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class Objective(Protocol):
    """The contract of the loop with everything that can be learnt."""

    def count(self, batch: Batch) -> int:
        """How many terms the loss of `batch` sums over: known from the batch alone, ≥ 0."""
        ...

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """Run `model` on `batch`; called with gradients enabled (training) or not (evaluation)."""
        ...


@runtime_checkable
class WholeStep(Protocol):
    """An objective whose terms depend on all samples of a step, such as a comparison of each pair with all others."""

    def begin(self, model: nn.Module, micro_batches: Sequence[Batch]) -> None:
        """Called with a step's micro-batches, on the device; the objective is then called with each, in this order."""
        ...


class TaskObjective(Objective, Protocol):
    """What a task learns by, and what its held-out data is judged by."""

    def evaluation(self) -> Objective:
        """The objective of held-out data: plain, so that runs with other objectives compare."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of `model(batch[inputs])` against `batch["targets"]`, computed in float32.

    Logits are (…, classes); targets (…) int64, `IGNORED` counts for nothing.

    Attributes:
        inputs: the batch's entry that the model takes: "tokens" (B, T) int64, or "images" (B, C, H, W) float32. Where
            the batch has "documents" (B, T), the model is given them too.
        label_smoothing: share of the target's probability spread over all classes, [0, 1).
        accuracy: also report the share of targets whose logit is the largest.
    """

    inputs: Literal["tokens", "images"] = "tokens"
    label_smoothing: float = 0.0
    accuracy: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ConfigError(f"label_smoothing={self.label_smoothing}: it must be in [0, 1)")

    @property
    def takes_parts(self) -> bool:
        """Whether it takes the logits of a head that is split as they are: see `logits_in_parts`."""
        return not self.accuracy

    def count(self, batch: Batch) -> int:
        """The targets that are not ignored."""
        return int((batch["targets"] != IGNORED).sum())

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class."""
        targets = batch["targets"].flatten()
        inside = {"documents": batch["documents"]} if "documents" in batch else {}
        if not self.accuracy and makes_loss_itself(model, targets):
            return Loss(model(batch["tokens"], targets=targets, label_smoothing=self.label_smoothing, **inside))
        with logits_in_parts() if self.takes_parts else nullcontext():
            logits = model(batch[self.inputs], **inside).flatten(0, -2)
        total = classes_sum(logits, batch, ignored=IGNORED, label_smoothing=self.label_smoothing)
        if not self.accuracy:
            return Loss(total)
        return Loss(total, {"accuracy": (logits.detach().argmax(-1) == targets).sum().to(torch.float32)})

    def evaluation(self) -> CrossEntropy:
        """The plain cross-entropy that held-out data is judged by: no smoothing."""
        return CrossEntropy(self.inputs, 0.0, self.accuracy)


def makes_loss_itself(model: nn.Module, targets: torch.Tensor) -> bool:
    """Whether `model` is a decoder on a GPU whose head and loss may be one operation, which never holds all logits: a
    plain head in the format of what is around it."""
    decoder = getattr(model, "module", model)
    plain = isinstance(decoder, Decoder) and type(decoder.lm_head) is nn.Linear
    return plain and gpu_kernels("cross_entropy", targets) is not None
