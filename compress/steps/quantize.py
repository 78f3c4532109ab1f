"""The pipeline's step `quantize`: a classifier's checkpoint becomes an INT8 artifact, calibrated or trained."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from safetensors.torch import load_file

from penjing.compress.distill.networks import load_teacher
from penjing.compress.distill.objective import Distillation, DistillWeights, Teacher
from penjing.compress.distill.task import Distilled
from penjing.compress.measure.data import ImageData, is_classifier
from penjing.compress.quantize.artifact import ArtifactSettings, quantize_checkpoint, write_artifact
from penjing.compress.quantize.bits import within_bits
from penjing.compress.quantize.place_resnet import apply_quantization, set_mode
from penjing.compress.quantize.targets import resolve
from penjing.compress.quantize.task import QuantizedTask
from penjing.compress.steps.distill import TrainingStep, train_checkpoint
from penjing.core.checkpoint.classifier import load_classifier
from penjing.core.errors import InputError
from penjing.core.models.resnet import ResNet
from penjing.core.progress import Progress
from penjing.train.families.base import Task
from penjing.train.objective.objective import CrossEntropy
from penjing.train.processes.world import choose_device
from penjing.train.recipe.recipe import RunRecipe

_TRAINED = "quantized"


class QuantizeStep(TrainingStep, ArtifactSettings):
    """INT8 for an image classifier.

    Attributes:
        steps: of quantization-aware training; 0 calibrates only.
        freeze_statistics: share of the steps after which batch norms keep their statistics.
        teacher: a checkpoint to learn from as well; None learns from the data's targets alone.
        temperature, distill: as of a distill step.
    """

    kind: Literal["quantize"] = "quantize"
    steps: int = Field(default=0, ge=0)
    freeze_statistics: float = Field(default=0.5, ge=0, le=1)
    teacher: Path | None = None
    temperature: float = Field(default=1.0, gt=0)
    distill: DistillWeights = DistillWeights()


def quantize_step(
    source: Path, partial: Path, step: QuantizeStep, data: ImageData, work: Path, progress: Progress
) -> dict[str, Any]:
    """Fill `partial`, not yet published, with the artifact of the classifier in `source`.

    Args:
        data: images that ranges are calibrated on and that parity is checked with.
        work: a folder for this step alone; after a kill, training goes on from there.

    Returns:
        What `report.json` holds.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is of another kind or damaged, or the artifact exceeds its parity bound.
    """
    resolve(step.target, step)
    if not is_classifier(source):
        raise InputError(
            f"{source} is a decoder: quantize steps are for image classifiers; a recipe without steps quantizes it"
        )
    if step.steps == 0:
        return quantize_checkpoint(source, partial, step, data, progress)
    began = time.monotonic()
    floating, config = load_classifier(source)
    step = within_bits(floating, step.target, step, data)

    def wrap(task: Task, recipe: RunRecipe) -> Task:
        inner = task if step.teacher is None else _with_teacher(task, recipe, source, step.teacher, step)
        return QuantizedTask(inner, source, step.target, step, data, int(step.freeze_statistics * step.steps))

    names = {"student": source} | ({} if step.teacher is None else {"teacher": step.teacher})
    trained = work / _TRAINED
    record = train_checkpoint(source, trained, step, work, progress, wrap, names)
    model = apply_quantization(ResNet(config.model), step.target, step)
    model.load_state_dict(load_file(trained / "model.safetensors"))
    set_mode(model, "on")
    facts = {"training_steps": step.steps, "training": record}
    report = write_artifact(partial, model, floating, config, step, data, facts)
    return report | {"seconds": time.monotonic() - began}


def _with_teacher(task: Task, recipe: RunRecipe, student: Path, teacher: Path, step: QuantizeStep) -> Task:
    plain = task.objective.evaluation()
    assert isinstance(plain, CrossEntropy)
    answers = Teacher(load_teacher(student, teacher), plain.inputs, choose_device(recipe.device), recipe.precision.mode)
    return Distilled(task, Distillation(plain, answers, step.distill, step.temperature), recipe.seed)
