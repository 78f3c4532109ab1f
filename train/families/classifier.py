"""The task of training an image classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penjing.core.checkpoint.classifier import load_classifier, save_classifier
from penjing.core.checkpoint.classifier_config import ClassifierConfig, classifier_config, fitted_pixels
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.resnet import Block, ResNet
from penjing.core.models.resnet_config import ResNetConfig, cifar_resnet, imagenet_resnet
from penjing.core.progress import Progress, typed
from penjing.train.data.fashion import CLASSES, load_fashion
from penjing.train.data.images import Images, ImageSet
from penjing.train.data.stream import Stream, one_pass, shuffled
from penjing.train.families.base import Family
from penjing.train.objective.objective import Batch, CrossEntropy, TaskObjective
from penjing.train.processes.world import World
from penjing.train.recipe.data import FashionData, SampleData
from penjing.train.recipe.model import ResNetModel
from penjing.train.recipe.recipe import RunRecipe, TrainRecipe
from penjing.train.sources.images import Wanted, class_names, load_images
from penjing.train.sources.mix import MixedSamples
from penjing.train.state.state import check_finite

_EVALUATION_BATCH = 500


class ImageClassification:
    """A ResNet on Fashion-MNIST, or on images of the user.

    Args:
        model: a recipe's section: classes, size and normalisation are those of the training images; or the config of a
            ready model, whose weights are those of `recipe.initial` and which keeps its normalisation.
    """

    unit = "images"

    def __init__(
        self,
        recipe: RunRecipe,
        model: ResNetModel | ClassifierConfig,
        data: FashionData | SampleData,
        progress: Progress,
    ) -> None:
        self._recipe = recipe
        self._data = data
        ready = model if isinstance(model, ClassifierConfig) else None
        self._train, self._test, names = _images(data, ready, recipe, progress)
        self.checkpoint = (
            _fitting(model, self._train)
            if isinstance(model, ClassifierConfig)
            else _new(model, data, self._train, names)
        )
        self.config = self.checkpoint.model
        self._mean, self._std = (np.array(x, np.float32) for x in (self.checkpoint.mean, self.checkpoint.std))
        self.objective: TaskObjective = CrossEntropy("images", recipe.objective.label_smoothing, accuracy=True)

    def build_model(self) -> nn.Module:
        """See `Task`; convolutions with channels last, which a CPU computes 1.2× faster in bfloat16."""
        model = ResNet(self.config)
        convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
        if not any(_overruns(convolution) for convolution in convolutions):
            for module in convolutions:  # not model.to(), which the tensors without data of preflight refuse
                module.weight = nn.Parameter(module.weight.detach().contiguous(memory_format=torch.channels_last))
        return model

    def initialize(self, model: nn.Module) -> None:
        """See `Task`."""
        torch.manual_seed(self._recipe.seed)
        initialize_resnet(model)
        if self._recipe.initial is not None:
            _load_initial(model, self._recipe.initial)

    def weights(self) -> None:
        """See `Task`."""

    def example(self, micro_batch: int) -> Batch:
        """See `Task`."""
        return next(iter(self.stream(micro_batch, World(size=self._data.batch_size // micro_batch))))

    def stream(self, micro_batch: int, world: World) -> Stream:
        """See `Task`."""
        data = self._data
        images = Images(self._train, self._mean, self._std, data.pad, data.flip, data.erase, data.scale, data.colour)
        return shuffled(
            MixedSamples(images, data.mix) if data.mix else images,
            batch_size=data.batch_size,
            micro_batch=micro_batch,
            rank=world.rank,
            world_size=world.size,
            seed=self._recipe.seed,
        )

    def held_out(self, micro_batch: int, world: World) -> Iterator[Batch]:
        """See `Task`: the first `evaluation.samples` test images."""
        images, most = Images(self._test, self._mean, self._std), self._recipe.evaluation.samples
        return one_pass(images, most, micro_batch=_EVALUATION_BATCH, rank=world.rank, world_size=world.size)

    def after_update(self, model: nn.Module, world: World) -> tuple[Callable[[int], None], ...]:
        """See `Task`: nothing."""
        return ()

    def export(self, model: nn.Module, folder: Path, created_by: dict[str, Any]) -> None:
        """See `Task`."""
        save_classifier(folder, self.checkpoint, model, created_by)

    def next_command(self, folder: Path) -> str:
        """See `Task`."""
        own = f" --set {typed(f'data.source={self._data.source}')}" if isinstance(self._data, SampleData) else ""
        return f"penjing compress quantize {typed(folder)} {typed(f'{folder}-int8')}{own}"


def _overruns(convolution: nn.Conv2d) -> bool:
    """With channels last, oneDNN (torch 2.13, AVX2 alone) writes past the end of its weights' gradient."""
    return convolution.kernel_size == (1, 1) and convolution.stride != (1, 1) and convolution.in_channels < 8


@torch.no_grad()
def initialize_resnet(model: nn.Module) -> None:
    """He's normal weights; the last norm of each residual starts at zero, so that blocks start as their shortcuts.

    https://arxiv.org/abs/1502.01852, https://arxiv.org/abs/1706.02677 section 5.1.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0.0, 0.01)
            nn.init.zeros_(module.bias)
    for module in model.modules():
        if isinstance(module, Block):
            last = module.layers[-1].norm
            assert isinstance(last, nn.BatchNorm2d)
            nn.init.zeros_(last.weight)


def _images(
    data: FashionData | SampleData, ready: ClassifierConfig | None, recipe: RunRecipe, progress: Progress
) -> tuple[ImageSet, ImageSet, tuple[str, ...]]:
    """The images to learn from, those held out, and the names of the classes.

    Raises:
        ConfigError: no source.
        InputError, SetupError: see `load_images` and `load_fashion`.
    """
    if isinstance(data, FashionData):
        return load_fashion("train", progress), load_fashion("test", progress), CLASSES
    if data.source is None:
        raise ConfigError("data.kind = 'samples' needs data.source (or data.images), such as 'photos/'")
    if ready is None:
        pixels = fitted_pixels((data.height, data.width), data.channels, data.fit, data.resize, data.filter)
        wanted = Wanted(pixels, class_names(data))
    else:
        wanted = Wanted(ready.pixels(), ready.labels)
    found = [
        load_images(data, wanted, data.held_out, split, most, progress)
        for split, most in (("train", data.most), ("test", recipe.evaluation.samples))
    ]
    return found[0], found[1], wanted.names


def _new(
    model: ResNetModel, data: FashionData | SampleData, images: ImageSet, names: tuple[str, ...]
) -> ClassifierConfig:
    mean, std = images.statistics()
    _, channels, height, width = images.images.shape
    fitted = {"fit": data.fit, "resize": data.resize, "filter": data.filter} if isinstance(data, SampleData) else {}
    return ClassifierConfig(
        model=resnet_config(model, images.num_classes, channels),
        image_size=(height, width),
        mean=tuple(float(value) for value in mean),
        std=tuple(float(value) for value in std),
        labels=names,
        **fitted,
    )


def _fitting(config: ClassifierConfig, data: ImageSet) -> ClassifierConfig:
    """`config`, if it fits the data.

    Raises:
        InputError: other classes, channels or sizes.
    """
    wanted = {
        "classes": (config.model.num_classes, data.num_classes),
        "channels": (config.model.in_channels, data.images.shape[1]),
        "image size": (config.image_size, data.images.shape[2:]),
    }
    for name, (ours, theirs) in wanted.items():
        if ours != theirs:
            raise InputError(f"the model has {name} {ours}, the data {theirs}; give the data that it was trained on")
    return config


def resnet_config(model: ResNetModel, num_classes: int, in_channels: int) -> ResNetConfig:
    """The architecture that a recipe's section describes.

    Raises:
        ConfigError: there is no network of its depth.
    """
    try:
        if model.variant == "cifar":
            return cifar_resnet(model.depth, num_classes, width=model.width, in_channels=in_channels)
        return imagenet_resnet(
            model.depth,
            num_classes,
            groups=model.groups,
            width_per_group=model.width_per_group,
            in_channels=in_channels,
        )
    except ValueError as error:
        raise ConfigError(f"model.{error}") from None


@torch.no_grad()
def _load_initial(model: nn.Module, folder: Path) -> None:
    given, _ = load_classifier(folder)
    check_finite(given.state_dict(), f"initial = {folder}")
    model.load_state_dict(given.state_dict())


def _new_task(recipe: TrainRecipe, progress: Progress) -> ImageClassification:
    assert isinstance(recipe.model, ResNetModel)
    assert isinstance(recipe.data, FashionData | SampleData)
    return ImageClassification(recipe, recipe.model, recipe.data, progress)


def _checkpoint_task(folder: Path, recipe: RunRecipe, progress: Progress) -> ImageClassification:
    assert isinstance(recipe.data, FashionData | SampleData)
    ready, written = classifier_config(folder), recipe.model if isinstance(recipe, TrainRecipe) else None
    if written is not None and not (
        isinstance(written, ResNetModel)
        and resnet_config(written, ready.model.num_classes, ready.model.in_channels) == ready.model
    ):
        raise InputError(f"initial = {folder} is of another architecture than [model]; leave [model] out")
    return ImageClassification(recipe, ready, recipe.data, progress)


FAMILY = Family(data=(FashionData, SampleData), new_task=_new_task, checkpoint_task=_checkpoint_task)
