"""Residual networks on one device: ResNet (He et al., https://arxiv.org/abs/1512.03385), ResNeXt
(https://arxiv.org/abs/1611.05431).

Post-activation blocks with batch norm; where the shape changes, the shortcut is a 1×1 convolution with batch norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penjing.core.models.resnet_config import BlockConfig, ResNetConfig


class ConvNorm(nn.Module):
    """Convolution without bias, then batch norm; padded so that stride 1 keeps the size."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Block(nn.Module):
    """relu(residual(x) + shortcut(x)); two 3×3 convolutions (basic), or 1×1, 3×3 with groups, 1×1 (bottleneck)."""

    def __init__(self, inputs: int, outputs: int, config: BlockConfig, groups: int):
        super().__init__()
        if len(config.hidden) == 1:
            layers = [
                ConvNorm(inputs, config.hidden[0], 3, config.stride),
                ConvNorm(config.hidden[0], outputs, 3),
            ]
        else:
            first, second = config.hidden
            layers = [
                ConvNorm(inputs, first, 1),
                ConvNorm(first, second, 3, config.stride, groups),
                ConvNorm(second, outputs, 1),
            ]
        self.layers = nn.ModuleList(layers)
        same = inputs == outputs and config.stride == 1 and not config.projection
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, config.stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, layer in enumerate(self.layers):
            y = layer(torch.relu(y) if index else y)
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Images (N, C, H, W) → logits (N, classes), both in the dtype of the parameters."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        large = config.stem == "imagenet"
        self.stem = ConvNorm(config.in_channels, config.stem_channels, 7 if large else 3, 2 if large else 1)
        self.pool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        blocks: list[nn.Module] = []
        width = config.stem_channels
        for stage in config.stages:
            for block in stage.blocks:
                blocks.append(Block(width, stage.channels, block, config.groups))
                width = stage.channels
        self.blocks = nn.ModuleList(blocks)
        self.fc = nn.Linear(width, config.num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))
