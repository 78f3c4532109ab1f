"""What each kind of step does: from a checkpoint folder to a checkpoint folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penjing.compress.measure.data import Calibrate, ImageData, is_classifier, open_data
from penjing.compress.prune.batch_norm import reestimate_batch_norms
from penjing.compress.recipe import Distill, FlowRecipe, Prune, Quantize, Step
from penjing.compress.steps.distill import DistillStep, distill_checkpoint
from penjing.compress.steps.prune import prune_checkpoint
from penjing.compress.steps.quantize import QuantizeStep, quantize_step
from penjing.compress.steps.quantize_decoder import DecoderQuantizeStep, quantize_decoder
from penjing.compress.steps.sparsify import SparsifyStep, sparsify_checkpoint
from penjing.core.checkpoint.classifier import load_classifier, save_classifier
from penjing.core.errors import ConfigError
from penjing.core.manifest import read_manifest
from penjing.core.progress import Progress


@dataclass(frozen=True)
class Places:
    """Where a step reads and writes: `scratch` is its own and outlives a kill."""

    source: Path
    partial: Path
    scratch: Path


def run_step(step: Step, recipe: FlowRecipe, places: Places, progress: Progress) -> dict[str, Any]:
    """Fill `places.partial` with the checkpoint that `step` makes of `places.source`.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        PenjingError: as the kinds say.
    """
    if isinstance(step, Prune):
        data = open_data(places.source, recipe.calibrate, progress) if step.needs_data() else None
        record = prune_checkpoint(places.source, places.partial, step, data, progress)
        if step.batch_norm and is_classifier(places.partial):
            record["batch_norms"] = refresh_batch_norms(places.partial, recipe.calibrate, progress)
        return record
    if isinstance(step, Quantize) and not is_classifier(places.source):
        teacher = teacher_of(step, recipe) or recipe.model
        settings = decoder_step(step)
        return quantize_decoder(places.source, teacher, places.partial, settings, places.scratch, progress)
    if isinstance(step, Quantize):
        images = open_data(places.source, recipe.calibrate, progress)
        assert isinstance(images, ImageData)
        quantize = QuantizeStep.model_validate(_own(step) | {"teacher": step.teacher})
        return quantize_step(places.source, places.partial, quantize, images, places.scratch, progress)
    if isinstance(step, Distill):
        settings = DistillStep.model_validate(_own(step))
        return distill_checkpoint(
            places.source, teacher_of(step, recipe), places.partial, settings, places.scratch, progress
        )
    settings = SparsifyStep.model_validate(_own(step))
    return sparsify_checkpoint(places.source, places.partial, settings, places.scratch, progress)


def _own(step: Step) -> dict[str, Any]:
    """What the kind itself is told: training begins anew when a setting changes, which the guard is not."""
    return step.model_dump(exclude_unset=True, exclude={"guard", "teacher", "int8"})


def decoder_step(step: Quantize) -> DecoderQuantizeStep:
    """What a decoder's quantize is told.

    Raises:
        ConfigError: a setting for classifiers.
    """
    own = step.model_dump(exclude_unset=True, exclude={"kind", "guard", "teacher"})
    wrong = sorted(own.keys() - DecoderQuantizeStep.model_fields.keys())
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: for image classifiers; a decoder's quantize has [steps.int8.transform], "
            "[steps.int8.quantize] and [steps.int8.calibration]"
        )
    return DecoderQuantizeStep.model_validate({"steps": step.steps, **own})


def teacher_of(step: Distill | Quantize, recipe: FlowRecipe) -> Path | None:
    """The network that a distill learns from: its own `teacher`, else the model that the run begins with; a quantize
    has none unless it names one, but a decoder that is trained in INT8 learns from that model too."""
    if isinstance(step, Quantize):
        own = step.steps > 0 and not is_classifier(recipe.model)
        return step.teacher or (recipe.model if own else None)
    if step.kind == "finetune":
        return None
    return step.teacher or recipe.model


def refresh_batch_norms(folder: Path, calibrate: Calibrate, progress: Progress) -> int:
    """Estimate the batch norms' statistics of the classifier in `folder`, not yet published, from training images.

    Returns:
        How many batch norms it has.
    """
    model, config = load_classifier(folder)
    progress.start("statistics of batch norms", 1)
    count = reestimate_batch_norms(model, open_data(folder, calibrate, progress).inputs())
    save_classifier(folder, config, model, read_manifest(folder).created_by)
    progress.advance()
    return count
