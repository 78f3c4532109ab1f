"""Small networks with the couplings of well-known architectures, each with an example input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig, StageConfig, cifar_resnet, imagenet_resnet

Made = tuple[nn.Module, tuple[Any, ...]]


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Module:
    layers = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([act()] if act else []))


def image(size: int = 16) -> tuple[Tensor]:
    return (torch.randn(2, 3, size, size),)


class DenseNet(nn.Module):
    """Concatenations of concatenations, a transition, and a classifier."""

    def __init__(self, width: int = 8, growth: int = 8, depth: int = 3):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            self.layers.append(
                nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(),
                    nn.Conv2d(width, 16, 1, bias=False),
                    nn.BatchNorm2d(16),
                    nn.ReLU(),
                    nn.Conv2d(16, growth, 3, padding=1, bias=False),
                )
            )
            width += growth
        self.transition = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 16, 1, bias=False), nn.AvgPool2d(2)
        )
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(self.transition(torch.cat(features, 1)).mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, gate: Callable[[Tensor], Tensor]):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    """MobileNetV2; with an activation and a gate also MobileNetV3 and EfficientNet."""

    def __init__(self, inputs: int, outputs: int, stride: int, act: Any, gate: Any):
        super().__init__()
        hidden = 2 * inputs
        layers = [conv(inputs, hidden, 1, act=act), conv(hidden, hidden, 3, stride, hidden, act)]
        if gate is not None:
            layers.append(SqueezeExcite(hidden, gate))
        self.layers = nn.Sequential(*layers, conv(hidden, outputs, 1, act=None))
        self.same = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.same else self.layers(x)


class MobileNet(nn.Module):
    def __init__(self, act: Any = nn.ReLU6, gate: Any = None):
        super().__init__()
        plan = ((8, 8, 1), (8, 16, 2), (16, 16, 1))
        self.stem = conv(3, 8, 3, 2, act=act)
        self.blocks = nn.Sequential(*(InvertedResidual(*row, act, gate) for row in plan))
        self.head = nn.Sequential(conv(16, 32, 1, act=act), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2))
        self.fc = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.head(self.blocks(self.stem(x))))


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(conv(3, 8), nn.MaxPool2d(2), conv(8, 16), conv(16, 16), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = conv(3, 8), conv(8, 16), conv(16, 32)
        self.up2 = nn.ConvTranspose2d(32, 16, 2, 2)
        self.merge2, self.merge1 = conv(32, 16), conv(24, 8)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.merge2(torch.cat([self.up2(self.middle(F.max_pool2d(b, 2))), b], 1))
        up = F.interpolate(c, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.merge1(torch.cat([up, a], 1)))


class Attention(nn.Module):
    """Separate projections; heads are counted from the width."""

    def __init__(self, width: int = 32, head_dim: int = 8):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width))
        self.norm1 = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.attention = nn.ModuleList(Attention(width) for _ in range(depth))
        self.norm2 = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        for norm1, attention, norm2, mlp in zip(self.norm1, self.attention, self.norm2, self.mlp, strict=True):
            x = x + attention(norm1(x))
            x = x + mlp(norm2(x))
        return self.head(x[:, 0])


class ConvNeXt(nn.Module):
    def __init__(self, width: int = 16, depth: int = 2):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(depth))
        self.norm = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.expand = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.contract = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.scale = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in range(len(self.depthwise)):
            y = self.norm[index](self.depthwise[index](x).permute(0, 2, 3, 1))
            y = self.scale[index] * self.contract[index](F.gelu(self.expand[index](y)))
            x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class ShuffleNet(nn.Module):
    """Grouped convolutions with a channel shuffle between them, and a split (V2)."""

    def __init__(self, width: int = 16, groups: int = 2):
        super().__init__()
        self.groups = groups
        self.stem = conv(3, width)
        self.first = conv(width, width, 1, groups=groups)
        self.second = conv(width, width, 1, groups=groups)
        self.branch = conv(width // 2, width // 2)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x))
        x = x.unflatten(1, (self.groups, x.shape[1] // self.groups)).transpose(1, 2).flatten(1, 2)
        left, right = self.second(x).chunk(2, 1)
        return self.fc(torch.cat([left, self.branch(right)], 1).mean((2, 3)))


def llama(**overrides: Any) -> Made:
    config = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    return Decoder(DecoderConfig.model_validate(config | overrides)), (torch.randint(0, 50, (2, 6)),)


def bert() -> Made:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
    )
    config._attn_implementation = "eager"
    return Encoder(BertModel(config)), (torch.randint(0, 50, (2, 6)),)


class Encoder(nn.Module):
    """A transformers encoder with a classifier on the pooled state, tensors in and out."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.head = body, nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(ids).pooler_output)


def bottlenecks(groups: int = 1) -> ResNetConfig:
    """A ResNet-50 or ResNeXt-50 with an eighth of the widths and two blocks in a stage: one that changes the width,
    and one that does not."""
    whole = imagenet_resnet(50, groups=groups)
    stages = []
    for stage in whole.stages:
        narrow = [{"hidden": tuple(width // 8 for width in block.hidden)} for block in stage.blocks]
        blocks = (block.model_copy(update=each) for block, each in zip(stage.blocks[:2], narrow, strict=False))
        stages.append(StageConfig(channels=stage.channels // 8, blocks=tuple(blocks)))
    return whole.model_copy(update={"stem_channels": 8, "num_classes": 10, "stages": tuple(stages)})


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "resnet_cifar": lambda: (ResNet(cifar_resnet(8, width=8)), image()),
    "resnet18": lambda: (ResNet(imagenet_resnet(18)), image(32)),
    "bottleneck": lambda: (ResNet(bottlenecks()), image(32)),
    "resnext": lambda: (ResNet(bottlenecks(groups=4)), image(32)),
    "densenet": lambda: (DenseNet(), image()),
    "mobilenet_v2": lambda: (MobileNet(), image()),
    "mobilenet_v3": lambda: (MobileNet(nn.Hardswish, F.hardsigmoid), image()),
    "efficientnet": lambda: (MobileNet(nn.SiLU, torch.sigmoid), image()),
    "vgg": lambda: (VGG(), image()),
    "unet": lambda: (UNet(), image()),
    "vit": lambda: (ViT(), image()),
    "convnext": lambda: (ConvNeXt(), image()),
    "shufflenet": lambda: (ShuffleNet(), image()),
    "llama_gqa": lambda: llama(tie_word_embeddings=True),
    "qwen3": lambda: llama(model_type="qwen3", qk_norm=True, num_key_value_heads=1),
    "bert": bert,
}
LARGE: dict[str, Callable[[], Made]] = {
    "resnet50": lambda: (ResNet(imagenet_resnet(50)), image(32)),
    "resnext50": lambda: (ResNet(imagenet_resnet(50, groups=32, width_per_group=4)), image(32)),
}
