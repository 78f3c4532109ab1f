"""Small residual networks whose norms are far from trivial."""

from __future__ import annotations

import torch
from torch import nn

from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import BlockConfig, ResNetConfig, StageConfig, cifar_resnet


def random_resnet(config: ResNetConfig, seed: int = 0) -> ResNet:
    """In evaluation mode; factors of norms are negative, tiny or zero in places."""
    torch.manual_seed(seed)
    model = ResNet(config)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.uniform_(module.weight, -0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            nn.init.normal_(module.running_mean, 0, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 2)
            with torch.no_grad():
                module.weight[0], module.weight[1] = 0.0, 1e-12
    return model.eval()


def basic(width: int = 8) -> ResNetConfig:
    """For 12 × 12 grey images."""
    return cifar_resnet(8, 10, width=width, in_channels=1)


def bottleneck() -> ResNetConfig:
    """With groups, a 7 × 7 stem, a max pool and uneven widths, as pruning leaves them; for 32 × 32 colour images."""
    blocks = (BlockConfig(hidden=(12, 20), stride=2), BlockConfig(hidden=(16, 24)))
    return ResNetConfig(
        num_classes=20,
        stem="imagenet",
        stem_channels=16,
        block="bottleneck",
        groups=4,
        stages=(StageConfig(channels=24, blocks=blocks), StageConfig(channels=40, blocks=blocks)),
    )


def images(config: ResNetConfig, count: int = 16, seed: int = 1) -> torch.Tensor:
    """(count, C, H, W) float32."""
    side = 12 if config.stem == "cifar" else 32
    return torch.randn(count, config.in_channels, side, side, generator=torch.Generator().manual_seed(seed))
