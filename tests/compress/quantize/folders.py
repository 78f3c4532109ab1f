"""Checkpoint folders of small classifiers, and images for them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from penjing.compress.samples.data import ImageData
from penjing.core.checkpoint.classifier import ClassifierConfig, save_classifier
from penjing.core.files import publish_folder
from penjing.core.images.normalise import normalise
from penjing.core.models.resnet import ResNet
from penjing.train.data.images import ImageSet
from tests.compress.quantize.networks import basic

MEAN, STD = 0.4, 0.25


@cache
def _trained() -> dict[str, torch.Tensor]:
    data = image_set(512, seed=3)
    pixels = torch.from_numpy(normalise(data.images, np.array([MEAN], np.float32), np.array([STD], np.float32)))
    targets = torch.from_numpy(data.labels.astype(np.int64))
    torch.manual_seed(0)
    model = ResNet(basic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for step in range(48):
        batch = slice(64 * (step % 8), 64 * (step % 8 + 1))
        optimizer.zero_grad()
        F.cross_entropy(model(pixels[batch]), targets[batch]).backward()
        optimizer.step()
    return model.state_dict()


def trained_resnet() -> ResNet:
    """A network that tells the textures of `image_set` apart, in evaluation mode."""
    model = ResNet(basic())
    model.load_state_dict(_trained())
    return model.eval()


def vision_folder(folder: Path, model: ResNet | None = None, side: int = 12) -> Path:
    """A checkpoint of `model`, a small one by default."""
    model = model or trained_resnet()
    config = ClassifierConfig(
        model=model.config,
        image_size=(side, side),
        mean=(MEAN,) * model.config.in_channels,
        std=(STD,) * model.config.in_channels,
        labels=tuple(str(index) for index in range(model.config.num_classes)),
    )
    with publish_folder(folder) as partial:
        save_classifier(partial, config, model, {"command": "tests"})
    return folder


def image_set(count: int = 64, side: int = 12, channels: int = 1, seed: int = 0) -> ImageSet:
    """Noise on a texture that is the class's."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, count, dtype=np.uint8)
    textures = np.random.default_rng(7).integers(0, 150, (10, channels, side, side), dtype=np.uint8)
    images = textures[labels] + generator.integers(0, 100, (count, channels, side, side), dtype=np.uint8)
    return ImageSet(images, labels, 10)


def image_data(count: int = 64, seed: int = 0) -> ImageData:
    """Batches of 32."""
    return ImageData(image_set(count, seed=seed), (MEAN,), (STD,), 32)
