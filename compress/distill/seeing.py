"""How decoders that see learn inside a compression run: from conversations about images, and from a teacher that sees
the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.distill.divergence import divergence_sum
from penjing.compress.distill.networks import check_decoder
from penjing.compress.distill.objective import DistillWeights
from penjing.compress.distill.task import WrappedTask
from penjing.compress.distill.training import Training, TrainingSettings, unused
from penjing.compress.samples.data import DataSettings
from penjing.compress.samples.own import OWN
from penjing.core.checkpoint.vision_language import load_vision_language, vision_language_config
from penjing.core.errors import ConfigError, InputError
from penjing.kernels.dispatch import force_torch
from penjing.train.families.base import Task
from penjing.train.numerics.precision import Precision, PrecisionConfig
from penjing.train.objective.answers import Answers
from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED, Batch, Loss, TaskObjective
from penjing.train.processes.devices import choose_device
from penjing.train.recipe.data import SightData
from penjing.train.recipe.recipe import RunRecipe
from penjing.train.state.state import check_finite


def conversations(source: Path, step: TrainingSettings, _: DataSettings) -> SightData:
    """The step's `sources`, rows with images.

    Raises:
        ConfigError: no rows, or settings of other data.
    """
    if not step.sources:
        raise ConfigError(f"{source} sees: give the step sources = rows with images, or 'builtin:scenes'")
    named = [*unused(step, {"pad", "flip", "erase", "scale", "colour", "document_mask"})]
    if wrong := [*named, *["mix"] * bool(step.mixture()), *["adapter"] * (step.beside() is not None)]:
        raise ConfigError(f"{source} sees, and has no use for {', '.join(wrong)}; leave it out")
    if OWN in step.sources:
        raise ConfigError(f"{OWN} are texts without images, which a decoder that sees does not learn from here")
    return SightData(
        kind="image-chat", batch_size=step.batch_size, micro_batch=step.micro_batch, sources=step.sources,
        images=step.images, sequence_length=step.sequence_length, held_out=step.held_out,
    )  # fmt: skip


class SightDistillation:
    """The weighted sum of the divergence from the teacher's answers and of the cross-entropy with the rows' own.

    Args:
        teacher: a `VisionLanguage`; it is given the same tokens and images.
    """

    def __init__(self, teacher: nn.Module, weights: DistillWeights, temperature: float, smoothing: float) -> None:
        self._teacher, self._weights = teacher.eval().requires_grad_(False), weights
        self._temperature, self._smoothing = temperature, smoothing

    def count(self, batch: Batch) -> int:
        """See `Objective`."""
        return Answers().count(batch)

    def __call__(self, model: nn.Module, batch: Batch) -> Loss:
        """See `Objective`; what a batch has: `Answers`.

        Raises:
            InputError: the teacher's logits hold NaN or infinity.
        """
        targets, weights = batch["targets"], self._weights
        counted = targets != IGNORED
        logits = _logits(model, batch)
        parts = dict[str, tuple[float, Tensor]]()
        if weights.logits:
            with torch.no_grad(), force_torch():  # kernels of inference round otherwise than what the student has
                taught = _logits(self._teacher, batch)
            found = divergence_sum(logits, taught, counted, self._temperature)
            parts["divergence"] = (weights.logits, found)
        if weights.cross_entropy:
            entropy = cross_entropy_sum(logits, targets, ignored=IGNORED, label_smoothing=self._smoothing)
            parts["cross_entropy"] = (weights.cross_entropy, entropy)
        metrics = {name: part.detach() for name, (_, part) in parts.items()}
        metrics["accuracy"] = ((logits.detach().argmax(-1) == targets) & counted).sum().to(torch.float32)
        return Loss(torch.stack([weight * part for weight, part in parts.values()]).sum(), metrics)

    def evaluation(self) -> Answers:
        """The plain loss and the share of exact answers."""
        return Answers()


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["tokens"], batch["images"], logit_rows=batch["rows"], seen=batch["seen"])


class _TaughtSight(WrappedTask):
    def __init__(self, task: Task, objective: SightDistillation) -> None:
        super().__init__(task)
        self.objective: TaskObjective = objective


def taught_by_sight(task: Task, recipe: RunRecipe, student: Path, teacher: Path, step: Any) -> Task:
    """The task of a decoder that learns from one that sees, as a step `distill` says.

    Raises:
        ConfigError: a setting that it has no use for.
        InputError: the teacher sees images otherwise, or has other tokens.
    """
    named = unused(step, {"loss", "features", "mix", "batch_norms", "relation_heads"})
    if wrong := [*named, *hidden_weights(step.weights)]:
        raise ConfigError(f"{student} sees; a teacher's logits alone teach it: leave {', '.join(wrong)} out")
    return learning_from(task, recipe, student, teacher, step.weights, step.temperature, step.label_smoothing)


def hidden_weights(weights: DistillWeights) -> list[str]:
    """Those of the weights that ask for hidden states, which nothing compares here."""
    return [name for name in ("hidden", "relations") if getattr(weights, name)]


def learning_from(
    task: Task,
    recipe: RunRecipe,
    student: Path,
    teacher: Path,
    weights: DistillWeights,
    temperature: float,
    smoothing: float = 0.0,
) -> Task:
    """`task`, of the network in `student`, which learns the answers of `teacher` too.

    Raises:
        InputError: the teacher sees images otherwise, or has other tokens.
    """
    check_decoder(student, teacher)
    ours, theirs = vision_language_config(student), vision_language_config(teacher)
    for name in ("image_token_id", "rows", "look"):
        if getattr(ours, name) != getattr(theirs, name):
            raise InputError(f"{student} and teacher {teacher} differ in {name}; both must be shown the same")
    if (ours.vision.image_size, ours.vision.num_channels) != (theirs.vision.image_size, theirs.vision.num_channels):
        raise InputError(f"{student} and teacher {teacher} take images of other sizes; both must be shown the same")
    network = load_vision_language(teacher)
    check_finite(network.state_dict(), f"teacher = {teacher}")
    device = choose_device(recipe.device)
    Precision(network.to(device), PrecisionConfig(mode=recipe.precision.mode), device)
    return _TaughtSight(task, SightDistillation(network, weights, temperature, smoothing))


TRAINING = Training(data=conversations, evaluation_samples=256, taught=taught_by_sight)
