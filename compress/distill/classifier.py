"""How image classifiers learn inside a compression run."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from penjing.compress.distill.networks import classifier_teacher
from penjing.compress.distill.training import Training, TrainingSettings, unused
from penjing.compress.samples.data import DataSettings
from penjing.core.checkpoint.classifier import classifier_config
from penjing.core.errors import ConfigError
from penjing.core.models.resnet_config import ResNetConfig
from penjing.train.recipe.data import FashionData, SampleData


def images(source: Path, step: TrainingSettings, data: DataSettings) -> FashionData | SampleData:
    """Fashion-MNIST or the source of [data], cropped after `pad`, flipped, `erase`d.

    Raises:
        ConfigError: settings of text.
    """
    wrong = unused(step, {"sources", "sequence_length", "document_mask", "held_out"})
    if wrong := [*wrong, *["adapter"] * (step.beside() is not None)]:
        raise ConfigError(f"{source} is an image classifier, which has no use for {', '.join(wrong)}; leave it out")
    sizes = {"batch_size": step.batch_size, "micro_batch": step.micro_batch}
    changes = {"pad": step.pad, "flip": step.flip, "erase": step.erase, "scale": step.scale, "colour": step.colour}
    changes["mix"] = step.mixture()
    if data.source is None:
        return FashionData(kind="fashion-mnist", **sizes, **changes)
    return SampleData(kind="samples", held_out=data.held_out, **data.source_settings(), **sizes, **changes)


def _architecture(folder: Path) -> ResNetConfig:
    return classifier_config(folder).model


def _teacher(student: Path, teacher: Path, _: TrainingSettings) -> nn.Module:
    return classifier_teacher(student, teacher)


TRAINING = Training(
    data=images,
    evaluation_samples=10_000,
    architecture=_architecture,
    teacher=_teacher,
)
