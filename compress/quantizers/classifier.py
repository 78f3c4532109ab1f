"""An image classifier becomes an INT8 artifact: calibrated or trained, written as ONNX, gated by parity."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from penjing.compress.distill.classifier import TRAINING
from penjing.compress.distill.objective import DistillWeights
from penjing.compress.distill.training import TrainingSettings, run_recipe_of, taught, train_checkpoint
from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import prepare_graph
from penjing.compress.graph.own import classifier_network
from penjing.compress.graph.place import place_quantizers
from penjing.compress.graph.ready import ready
from penjing.compress.graph.stored import stored
from penjing.compress.graph.task import QuantizedTask, trained_network
from penjing.compress.parity.classifier import ClassifierParity
from penjing.compress.quantize.targets import GraphSettings, NetworkSettings, resolve
from penjing.compress.quantizers.onnx import quantization_for, said_of_network, said_of_parity, write_records
from penjing.compress.samples.data import DataSettings, ImageData, image_samples
from penjing.core.artifact.base import MODEL_FILE
from penjing.core.checkpoint.classifier import ClassifierConfig, load_classifier, save_classifier_config
from penjing.core.errors import InputError
from penjing.core.graph.network import Network
from penjing.core.progress import Progress, Silent
from penjing.core.work import Places
from penjing.train.families.base import Task
from penjing.train.recipe.recipe import RunRecipe

PIXEL_BYTES = 1 << 18  # of the images in the parity record
_TRAINED = "quantized"


class ArtifactSettings(NetworkSettings):
    """How a classifier is quantized and what its artifact must pass."""

    parity_bound: float = Field(
        default=0.1,
        gt=0,
        description="Largest difference between a logit of the fake-quantized model and of ONNX Runtime, in units of "
        "how much logits vary from image to image.",
    )
    parity_images: int = Field(default=32, ge=2, description="Images that are compared and kept for `verify`.")


class ClassifierQuantize(TrainingSettings, ArtifactSettings):
    """INT8 for an image classifier."""

    steps: int = Field(default=0, ge=0, description="Updates of quantization-aware training; 0 calibrates only.")
    teacher: Path | None = Field(default=None, description="A checkpoint to learn from as well; none given: none.")
    temperature: float = Field(default=1.0, gt=0, description="Divides the logits of teacher and student.")
    distill: DistillWeights = Field(default=DistillWeights(), description="Weights of the parts of the loss.")


def check(source: Path, step: ClassifierQuantize, data: DataSettings) -> None:
    """Refuse settings that do not fit.

    Raises:
        ConfigError: the target cannot express them, or they are of other data.
    """
    resolve(step.target, step)
    if step.steps:
        run_recipe_of(source, step, TRAINING, data, source)


def quantize(
    places: Places, step: ClassifierQuantize, data: DataSettings, _: Path, progress: Progress
) -> dict[str, Any]:
    """Fill `places.partial`, not yet published, with the artifact of the classifier in `places.source`.

    After a kill, training goes on from `places.scratch`.

    Returns:
        What it decided and measured, JSON-ready.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is of another kind or damaged, or the artifact fails its parity gate.
    """
    source = places.source
    samples = image_samples(source, data, progress)
    if step.steps == 0:
        quantized = quantize_checkpoint(source, places.partial, step, samples, progress)
        return {"kind": "quantize", "quantized": quantized | {"training_steps": 0}}
    model, config = load_classifier(source)
    floating = classifier_network(model, config.image_size)
    made, settings = ready(floating, _graph_settings(step), samples)

    def wrap(task: Task, run: RunRecipe) -> Task:
        if step.teacher is not None:
            task = taught(task, run, TRAINING, source, step.teacher, step, step.distill, step.temperature)
        return QuantizedTask(task, made, settings, samples, one_answer=True)

    names = {"student": source} | ({} if step.teacher is None else {"teacher": step.teacher})
    trained = places.scratch / _TRAINED
    training = train_checkpoint(source, trained, step, TRAINING, data, places.scratch, progress, wrap, names)
    network = trained_network(made, settings, trained)
    quantized = write_artifact(places.partial, network, floating, config, step, samples)
    return {"kind": "quantize", "quantized": quantized | {"training_steps": step.steps}, "training": training}


def quantize_checkpoint(
    source: Path, partial: Path, settings: ArtifactSettings, data: ImageData, progress: Progress | None = None
) -> dict[str, Any]:
    """Post-training quantization: calibrate the classifier in `source` on `data` and write its artifact.

    Args:
        partial: an existing folder, not yet published; it becomes complete.

    Returns:
        What a report says of a quantized network.

    Raises:
        ConfigError: the target cannot express the settings.
        InputError: the checkpoint is damaged or not finite, the data do not fit, or the parity bound is exceeded.
    """
    progress = progress or Silent()
    model, config = load_classifier(source)
    floating = classifier_network(model, config.image_size)
    progress.start("calibrating", 1)
    made, resolved = ready(floating, _graph_settings(settings), data)
    network = place_quantizers(made.copy(), resolved)
    prepare_graph(network, made, resolved, data)
    progress.advance()
    return write_artifact(partial, network, floating, config, settings, data)


def _graph_settings(settings: ArtifactSettings) -> GraphSettings:
    return GraphSettings(**settings.model_dump(include=set(NetworkSettings.model_fields)))


def write_artifact(
    partial: Path,
    network: Network,
    floating: Network,
    config: ClassifierConfig,
    settings: ArtifactSettings,
    data: ImageData,
) -> dict[str, Any]:
    """Fill `partial` with the artifact of `network`: quantized, and calibrated or trained.

    Args:
        floating: the network before quantization, whose answers are compared with.

    Returns:
        What a report says of a quantized network.

    Raises:
        InputError: the parity bound is exceeded: the artifact is refused.
    """
    network.module.eval()
    quantization = quantization_for(settings.target, settings)
    made = stored(network, settings.target)
    export_network(made, partial / MODEL_FILE, {}, settings.target)
    comparison = ClassifierParity(_pixels(data, settings.parity_images), config)
    parity, held = comparison.measure_network(network, made, partial / MODEL_FILE, quantization, settings.parity_bound)
    save_classifier_config(partial, config)
    write_records(partial, quantization, parity)
    said = said_of_network(network, quantization, islice(data.inputs(), 1))
    return said | said_of_parity(parity, held) | {"agreement": _agreement(network, floating, data)}


def _pixels(data: ImageData, count: int) -> NDArray[np.uint8]:
    images = data.images.images
    if len(images) == 0:
        raise InputError("there is no image to check parity with; raise data.images")
    return images[: min(count, max(2, PIXEL_BYTES // images[0].nbytes))]


@torch.no_grad()
def _agreement(network: Network, floating: Network, data: ImageData) -> float:
    """Share of the calibration images whose class both choose."""
    same = total = 0
    for (images,) in data.inputs():
        same += int((network(images)[0].argmax(1) == floating(images)[0].argmax(1)).sum())
        total += len(images)
    return same / total
