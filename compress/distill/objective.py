"""What a student learns from its teacher: an objective of train's loop, whose parts are weighted settings.

Every part is a sum over the counted terms (tokens with a target, images), as `train/objective/objective.py` asks, so
that accumulation and the number of processes do not change an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from penjing.compress.distill.divergence import divergence_sum, top_divergence_sum
from penjing.core.config import Config
from penjing.kernels.dispatch import force_torch
from penjing.train.numerics.precision import Mode, Precision, PrecisionConfig
from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED, Batch, CrossEntropy, Loss


class DistillWeights(Config):
    """The weight of each part of the loss; 0 leaves it out, and by default only the teacher's logits teach."""

    logits: float = Field(default=1.0, ge=0, description="Divergence of the softened distributions (divergence.py).")
    cross_entropy: float = Field(default=0.0, ge=0, description="Cross-entropy with the data's own targets.")
    hidden: float = Field(
        default=0.0, ge=0, description="Hidden states after each layer, through learned projections (features.py)."
    )
    relations: float = Field(default=0.0, ge=0, description="Attention relations of the last layer (features.py).")

    @model_validator(mode="after")
    def _something_teaches(self) -> DistillWeights:
        if self.logits == self.hidden == self.relations == 0:
            raise ValueError("logits, hidden and relations are all 0: nothing comes from the teacher; raise one")
        return self


class Matcher(Protocol):
    """A part of the loss that compares what modules inside the two networks give.

    Attributes:
        name: of the metric.
        student, teacher: names of the modules, as many of both, that are compared pair by pair.
    """

    @property
    def name(self) -> str: ...

    @property
    def student(self) -> tuple[str, ...]: ...

    @property
    def teacher(self) -> tuple[str, ...]: ...

    def loss(self, model: nn.Module, seen: list[Tensor], taught: list[Tensor], batch: Batch) -> Tensor:
        """Sum over the counted terms of `batch`: a scalar.

        Args:
            model: the student, with the parameters that the part itself trains.
            seen, taught: outputs of the student's and the teacher's modules, in order.
        """
        ...


class Teacher:
    """A network that only answers: evaluation mode, no gradients, the precision of the student's training.

    Args:
        names: modules whose outputs are wanted beside the logits.
    """

    def __init__(
        self, model: nn.Module, inputs: str, device: torch.device, mode: Mode = "fp32", names: tuple[str, ...] = ()
    ) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self._inputs = inputs
        self._names = names
        Precision(self.model, PrecisionConfig(mode=mode), device)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (N, V) of all rows of `batch`, and the wanted outputs by module name."""
        # The C++ kernels of inference round otherwise than what the student trains with, and need tensors with data.
        alike = force_torch() if batch[self._inputs].device.type == "cpu" else nullcontext()
        with captured(self.model, self._names) as outputs, alike:
            logits = self.model(batch[self._inputs], **inside(batch))
        return logits.flatten(0, -2), outputs


@dataclass(frozen=True)
class Distillation:
    """The weighted sum of divergence, cross-entropy and `matchers`; held-out data is judged by the plain loss.

    Attributes:
        plain: cross-entropy of the same batches: says what is counted.
        teacher: None where the batches hold the teacher's likeliest classes (cache.py).
        matchers: (part, weight) pairs.
    """

    plain: CrossEntropy
    teacher: Teacher | None
    weights: DistillWeights
    temperature: float = 1.0
    matchers: tuple[tuple[Matcher, float], ...] = ()

    def count(self, batch: Batch) -> int:
        """See `Objective`."""
        return self.plain.count(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See the class.

        Raises:
            InputError: the teacher's logits hold NaN or infinity.
        """
        student = getattr(model, "module", model)
        targets = batch["targets"].flatten()
        taught_logits, taught = (None, {}) if self.teacher is None else self.teacher(batch)
        wanted = [name for matcher, _ in self.matchers for name in matcher.student]
        with captured(student, wanted) as seen:
            logits = model(batch[self.plain.inputs], **inside(batch)).flatten(0, -2)
        parts: dict[str, tuple[float, Tensor]] = {}
        if self.weights.logits:
            parts["divergence"] = (self.weights.logits, self._divergence(logits, taught_logits, batch))
        if self.weights.cross_entropy:
            entropy = cross_entropy_sum(logits, targets, ignored=IGNORED, label_smoothing=self.plain.label_smoothing)
            parts["cross_entropy"] = (self.weights.cross_entropy, entropy)
        for matcher, weight in self.matchers:
            ours, theirs = ([found[name] for name in names] for found, names in (
                (seen, matcher.student), (taught, matcher.teacher),
            ))  # fmt: skip
            parts[matcher.name] = (weight, matcher.loss(student, ours, theirs, batch))
        metrics = {name: part.detach() for name, (_, part) in parts.items()}
        if self.plain.accuracy:
            metrics["accuracy"] = (logits.detach().argmax(-1) == targets).sum().to(torch.float32)
        total = torch.stack([weight * part for weight, part in parts.values()]).sum()
        return Loss(total, metrics)

    def _divergence(self, logits: Tensor, taught: Tensor | None, batch: Batch) -> Tensor:
        counted = batch["targets"].flatten() != IGNORED
        if taught is not None:
            return divergence_sum(logits, taught, counted, self.temperature)
        index, top, rest = (batch[name] for name in ("teacher_index", "teacher_top", "teacher_rest"))
        rows = index.flatten(0, -2).to(torch.int64), top.flatten(0, -2), rest.flatten()
        return top_divergence_sum(logits, *rows, counted, self.temperature)

    def evaluation(self) -> CrossEntropy:
        """The plain loss, so that students compare with whatever else was trained on the data."""
        return self.plain.evaluation()


def inside(batch: Batch) -> dict[str, Tensor]:
    """Keyword arguments of the network: where documents begin, if the batch says so."""
    return {"documents": batch["documents"]} if "documents" in batch else {}


@contextmanager
def captured(model: nn.Module, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """A dictionary that fills with the outputs of the modules `names` as `model` runs inside."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            outputs[name] = output

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in dict.fromkeys(names)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
