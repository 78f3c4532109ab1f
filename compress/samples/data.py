"""Samples that a network is looked at with while it is compressed: for importance and for statistics, never for
evaluation.

A classifier sees training images of Fashion-MNIST, normalised as its checkpoint says; a decoder the windows of
`samples/text.py`. Every pass gives the same batches in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from penjing.compress.samples.own import OWN, OwnTexts, own_texts
from penjing.compress.samples.retrieval import calibration_paragraphs, own_paragraphs
from penjing.compress.samples.text import decoder_windows
from penjing.compress.sight.settings import ImageRows
from penjing.core.checkpoint.classifier import ClassifierConfig, classifier_config
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.errors import ConfigError, InputError
from penjing.core.images.normalise import normalise
from penjing.core.progress import Progress
from penjing.core.text.text_tokenizer import TextTokenizer, encoder_config
from penjing.train.data.fashion import load_fashion
from penjing.train.data.images import ImageSet
from penjing.train.objective.cross_entropy import cross_entropy_sum
from penjing.train.objective.objective import IGNORED
from penjing.train.sources.images import Wanted, load_images
from penjing.train.sources.settings import SourceSettings, TrainingSource


class DataSettings(ImageRows, TrainingSource):
    """`[data]`: the samples that a network is looked at with while it is compressed, never those of `[evaluate]`."""

    images: int = Field(
        default=2048,
        ge=1,
        description="How many training images, or other samples of a graph, at most. A path in place of the number is "
        "another spelling of `source`.",
    )
    batch_images: int = Field(default=256, ge=1, description="Images that run at a time.")
    tokens: int = Field(default=6144, ge=32, description="Tokens of text, for a decoder; a multiple of window.")
    window: int = Field(default=512, ge=16, description="Tokens of a window, which starts afresh.")
    code: float = Field(
        default=0.25, ge=0, le=1, description="Share of the windows that are source code; your own text does not count."
    )
    calibrate: tuple[Path, ...] = Field(
        default=(),
        description="Your own text, for a decoder or a text encoder: UTF-8 files, folders of them, and .jsonl files, "
        'each line of which has "text", or, for a decoder, "messages" that its chat template writes; and '
        '"builtin:own", texts that the decoder writes itself.',
    )
    own: float = Field(
        default=0.5, gt=0, le=1, description="Share of the windows or paragraphs that are your own text."
    )
    own_texts: OwnTexts = Field(default=OwnTexts(), description='What a decoder writes for "builtin:own".')
    batch_windows: int = Field(default=4, ge=1, description="Windows that run at a time.")
    texts: int = Field(default=128, ge=8, description="Paragraphs, for a text encoder.")

    @model_validator(mode="after")
    def _whole_windows(self) -> DataSettings:
        if self.tokens % self.window:
            raise ValueError(f"tokens={self.tokens} is not a multiple of window={self.window}")
        return self


class Samples(Protocol):
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
        """See `Samples`."""
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        for begin in range(0, len(self.images.images), self.batch):
            yield (torch.from_numpy(normalise(self.images.images[begin : begin + self.batch], mean, std)),)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`."""
        labels = torch.from_numpy(self.images.labels.astype(np.int64)).split(self.batch)
        for (images,), targets_B in zip(self.inputs(), labels, strict=True):
            yield F.cross_entropy(model(images), targets_B)


@dataclass(frozen=True)
class TokenData:
    """Windows of text (W, T) int64; the loss is that of each next token, a window at a time: logits are large."""

    windows: Tensor
    batch: int

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """See `Samples`."""
        for tokens_BT in self.windows.split(self.batch):
            yield (tokens_BT,)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`."""
        for tokens_1T in self.windows.split(1):
            logits_TV = model(tokens_1T)[0]
            targets_T = torch.cat([tokens_1T[0, 1:], torch.tensor([IGNORED])])
            yield cross_entropy_sum(logits_TV, targets_T, ignored=IGNORED) / (len(targets_T) - 1)


@dataclass(frozen=True)
class TextSamples:
    """Paragraphs, one at a time: what stands at padding would widen ranges."""

    tokenizer: TextTokenizer
    texts: list[str]

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        """Token ids and mask of one text, (1, T) int64 both."""
        for text in self.texts:
            yield self.tokenizer([text]).tensors()

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        """See `Samples`.

        Raises:
            ConfigError: embeddings have no targets.
        """
        raise ConfigError("a text encoder's samples have no targets, so that it has no loss")


def image_samples(folder: Path, settings: DataSettings, progress: Progress) -> ImageData:
    """Training images that fit the classifier in `folder`.

    Raises:
        InputError: the checkpoint is damaged, or the images do not fit it.
        SetupError: the images cannot be fetched.
    """
    config = classifier_config(folder)
    images = fitting_images(folder, config, "train", progress, settings, settings.held_out, settings.images)
    return ImageData(images, config.mean, config.std, settings.batch_images)


def token_samples(folder: Path, settings: DataSettings, progress: Progress) -> TokenData:
    """Calibration text in the tokens of the decoder in `folder`, which writes its own where that is named.

    Raises:
        ConfigError: windows longer than the decoder's context.
        InputError: the checkpoint is damaged, or there is less text than asked for.
    """
    check_window(folder, settings)
    own = [own_texts(folder, settings.own_texts, progress) if str(path) == OWN else path for path in settings.calibrate]
    windows_WT = decoder_windows(folder, settings.tokens, settings.window, settings.code, own, settings.own)
    return TokenData(windows_WT, settings.batch_windows)


def text_samples(folder: Path, settings: DataSettings, _: Progress) -> TextSamples:
    """Calibration paragraphs in the tokens of the text encoder in `folder`, a share of them the user's own.

    Raises:
        ConfigError: text of its own is asked for.
        InputError: the checkpoint is damaged, a file cannot be read, or there are fewer paragraphs than asked for.
    """
    if OWN in map(str, settings.calibrate):
        raise ConfigError(f"data.calibrate: {OWN} is for decoders; {folder} is a text encoder, which writes nothing")
    tokenizer, own = TextTokenizer(folder, encoder_config(folder)), list[str]()
    if settings.calibrate:
        own = own_paragraphs(settings.calibrate, max(1, round(settings.own * settings.texts)))
    return TextSamples(tokenizer, own + calibration_paragraphs(settings.texts - len(own)))


def check_window(folder: Path, settings: DataSettings) -> None:
    """Refuse windows longer than the decoder's context.

    Raises:
        ConfigError: they are.
    """
    context = open_checkpoint(folder).config.max_position_embeddings
    if settings.window > context:
        raise ConfigError(
            f"data.window={settings.window} is longer than the context of {context} tokens of {folder}; "
            "use a smaller one"
        )


def fitting_images(
    folder: Path,
    config: ClassifierConfig,
    split: str,
    progress: Progress,
    settings: SourceSettings | None = None,
    held_out: float = 0.0,
    most: int = sys.maxsize,
) -> ImageSet:
    """The "train" or "test" images for the classifier in `folder`: of the source that `settings` name, fitted as
    it says, else of Fashion-MNIST, if it takes such; at most `most`.

    Raises:
        InputError: it takes images of another shape, or has other classes.
        SetupError: the images cannot be fetched, or do not fit into memory.
    """
    if settings is not None and settings.source is not None:
        wanted = Wanted(config.pixels(), config.labels)
        return load_images(settings, wanted, held_out, split, most, progress)
    data = load_fashion(split, progress)
    shape, takes = data.images.shape[1:], (config.model.in_channels, *config.image_size)
    if shape != takes or data.num_classes != config.model.num_classes:
        raise InputError(
            f"{folder} takes images of {takes} in {config.model.num_classes} classes, Fashion-MNIST has {shape} in "
            f"{data.num_classes}; name the images that it learnt from, as data.source = 'photos/'"
        )
    return data.first(most)
