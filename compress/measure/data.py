"""Samples that a network is looked at with while it is compressed: for importance and for statistics, never for
evaluation.

A classifier sees training images of Fashion-MNIST, normalised as its checkpoint says; a decoder the calibration text
of `core/text/corpus.py`. Every pass gives the same batches in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from penjing.core.checkpoint.classifier import ClassifierConfig, classifier_config
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.config import Config
from penjing.core.errors import ConfigError, InputError
from penjing.core.manifest import read_json_object
from penjing.core.progress import Progress
from penjing.core.text.corpus import calibration_tokens
from penjing.core.text.tokenizer import Tokenizer
from penjing.train.data.fashion import load_fashion
from penjing.train.data.images import ImageSet, normalise
from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED


class Calibrate(Config):
    """How many samples; `images` for classifiers, `tokens` in windows for decoders, each `batch_…` at a time."""

    images: int = Field(default=2048, ge=1)
    batch_images: int = Field(default=256, ge=1)
    tokens: int = Field(default=16384, ge=32)
    window: int = Field(default=512, ge=16)
    batch_windows: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _whole_windows(self) -> Calibrate:
        if self.tokens % self.window:
            raise ValueError(f"tokens={self.tokens} is not a multiple of window={self.window}")
        return self


class CompressData(Protocol):
    """Calibration batches of a task."""

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """Arguments of the network, batch after batch: images (B, C, H, W) float32, or tokens (B, T) int64."""
        ...

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """The network's mean cross-entropy on a few samples each, with a graph: call `backward` before the next one."""
        ...


@dataclass(frozen=True)
class ImageData:
    """Labelled images."""

    images: ImageSet
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch: int

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `CompressData`."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        for begin in range(0, len(self.images.images), self.batch):
            yield (torch.from_numpy(normalise(self.images.images[begin : begin + self.batch], mean, std)),)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `CompressData`."""
        labels = torch.from_numpy(self.images.labels.astype(np.int64)).split(self.batch)
        for (images,), targets_B in zip(self.inputs(), labels, strict=True):
            yield F.cross_entropy(model(images), targets_B)


@dataclass(frozen=True)
class TokenData:
    """Windows of text (W, T) int64; the loss is that of each next token, a window at a time: logits are large."""

    windows: Tensor
    batch: int

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `CompressData`."""
        for tokens_BT in self.windows.split(self.batch):
            yield (tokens_BT,)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `CompressData`."""
        for tokens_1T in self.windows.split(1):
            logits_TV = model(tokens_1T)[0]
            targets_T = torch.cat([tokens_1T[0, 1:], torch.tensor([IGNORED])])
            yield cross_entropy_sum(logits_TV, targets_T, ignored=IGNORED) / (len(targets_T) - 1)


def is_classifier(folder: Path) -> bool:
    """Whether a checkpoint folder holds an image classifier; else it is taken for a decoder.

    Raises:
        InputError: there is no readable `config.json`.
    """
    return "task" in read_json_object(folder / "config.json")


def open_data(folder: Path, calibrate: Calibrate, progress: Progress) -> CompressData:
    """Calibration samples that fit the checkpoint in `folder`.

    Raises:
        ConfigError: windows longer than the decoder's context.
        InputError: the checkpoint is damaged, the images do not fit it, or there is less text than asked for.
        SetupError: the images cannot be fetched.
    """
    if is_classifier(folder):
        config = classifier_config(folder)
        images = fitting_images(folder, config, "train", progress).first(calibrate.images)
        return ImageData(images, config.mean, config.std, calibrate.batch_images)
    context = open_checkpoint(folder).config.max_position_embeddings
    if calibrate.window > context:
        raise ConfigError(
            f"calibrate.window={calibrate.window} is longer than the context of {context} tokens of {folder}; "
            "use a smaller one"
        )
    tokens = calibration_tokens(Tokenizer.from_folder(folder), calibrate.tokens)
    return TokenData(tokens.view(-1, calibrate.window), calibrate.batch_windows)


def fitting_images(folder: Path, config: ClassifierConfig, split: str, progress: Progress) -> ImageSet:
    """The "train" or "test" images of Fashion-MNIST, if the classifier in `folder` takes such.

    Raises:
        InputError: it takes images of another shape, or has another number of classes.
        SetupError: the images cannot be fetched.
    """
    data = load_fashion(split, progress)
    shape, takes = data.images.shape[1:], (config.model.in_channels, *config.image_size)
    if shape != takes or data.num_classes != config.model.num_classes:
        raise InputError(
            f"{folder} takes images of {takes} in {config.model.num_classes} classes, Fashion-MNIST has {shape} in "
            f"{data.num_classes}; only classifiers that 'penjing train' made from Fashion-MNIST are compressed"
        )
    return data
