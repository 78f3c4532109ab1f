"""Small residual networks whose norms are far from trivial."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from onnx import numpy_helper
from torch import nn

from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.own import classifier_network
from penjing.compress.graph.place import apply_quantization
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.graph.network import Network
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


def network_of(model: ResNet) -> Network:
    """`model` as the graph that is quantized."""
    return classifier_network(model, tuple(images(model.config, 1).shape[2:]))  # type: ignore[arg-type]


def quantized(model: ResNet, x: torch.Tensor, **settings: object) -> Network:
    """`model` as a graph that rounds, calibrated on `x`."""
    network = apply_quantization(network_of(model), GraphSettings.model_validate(settings))
    calibrate_graph(network, [(x,)])
    return network


def integer_weights(path: Path) -> dict[str, torch.Tensor]:
    """Layer → its stored weight in a file, int8; floating layers are left out."""
    return {
        constant.name.removesuffix(".weight"): torch.from_numpy(numpy_helper.to_array(constant).copy())
        for constant in onnx.load(str(path)).graph.initializer
        if constant.name.endswith(".weight") and constant.data_type == onnx.TensorProto.INT8
    }
