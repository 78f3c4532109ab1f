"""Tiny image classifiers, and made-up images in place of Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from penjing.core.checkpoint.classifier import ClassifierConfig, save_classifier
from penjing.core.files import publish_folder
from penjing.core.images.normalise import normalise
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig, cifar_resnet
from penjing.train.data.fashion import CLASSES
from penjing.train.data.images import ImageSet

SIDE = 12
MEAN, STD = 0.5, 0.25


def made_up_images(split: str, progress: object = None) -> ImageSet:
    """320 images of noise on a texture that is the class's."""
    generator = np.random.default_rng({"train": 0, "test": 1}[split])
    labels = generator.integers(0, 10, 320, dtype=np.uint8)
    textures = np.random.default_rng(7).integers(0, 150, (10, 1, SIDE, SIDE), dtype=np.uint8)
    images = textures[labels] + generator.integers(0, 100, (320, 1, SIDE, SIDE), dtype=np.uint8)
    return ImageSet(images, labels, 10)


def write_classifier(
    folder: Path,
    *,
    model: ResNetConfig | None = None,
    image_size: tuple[int, int] = (SIDE, SIDE),
    scale: float = 1.0,
    seed: int = 0,
) -> Path:
    """A ResNet with random features; on made-up images its last layer, fitted to the training ones, is right about four
    times in five. `scale` multiplies that layer."""
    config = model or cifar_resnet(8, width=8, in_channels=1)
    torch.manual_seed(seed)
    network = ResNet(config).eval()
    if config.in_channels == 1:
        _fit_head(network)
    with torch.no_grad():
        network.fc.weight *= scale
    vision = ClassifierConfig(
        model=config,
        image_size=image_size,
        mean=(MEAN,) * config.in_channels,
        std=(STD,) * config.in_channels,
        labels=CLASSES,
    )
    with publish_folder(folder) as partial:
        save_classifier(partial, vision, network, {"command": "tests"})
    return folder


@torch.no_grad()
def _fit_head(network: ResNet) -> None:
    """Ridge regression from features to classes."""
    data = made_up_images("train")
    head, network.fc = network.fc, torch.nn.Identity()  # type: ignore[assignment]
    images = torch.from_numpy(normalise(data.images, np.array([MEAN], np.float32), np.array([STD], np.float32)))
    features = network(images).double()
    network.fc = head
    design = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    targets = torch.nn.functional.one_hot(torch.from_numpy(data.labels.astype(np.int64)), 10).double()
    penalty = 1e-4 * torch.eye(design.shape[1], dtype=torch.float64)
    solved = torch.linalg.solve(design.T @ design + penalty, design.T @ targets)
    head.weight.copy_(solved[:-1].T)
    head.bias.copy_(solved[-1])
