"""Small checkpoints that pruning works on, and calibration batches for them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.families.base import Pruner, family_at
from penjing.compress.steps.prune import Prune, prune_checkpoint
from penjing.core.checkpoint.classifier import ClassifierConfig, save_classifier
from penjing.core.checkpoint.decoder import save_checkpoint
from penjing.core.manifest import write_manifest
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig, cifar_resnet
from penjing.core.progress import Progress, Silent

DECODER = DecoderConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


class Data:
    """Calibration batches; the same in every pass."""

    def __init__(self, *batches: tuple[Tensor, Tensor]) -> None:
        self.batches = batches

    def inputs(self) -> Iterator[tuple[Tensor, ...]]:
        for x, _ in self.batches:
            yield (x,)

    def losses(self, model: nn.Module) -> Iterator[Tensor]:
        for x, y in self.batches:
            yield F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def tokens() -> Data:
    torch.manual_seed(1)
    return Data(*[(x[:, :-1], x[:, 1:]) for x in torch.randint(50, (2, 3, 17))])


def images() -> Data:
    torch.manual_seed(1)
    return Data(*[(torch.randn(4, 1, 12, 12), torch.randint(10, (4,))) for _ in range(2)])


def decoder(folder: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> Decoder:
    """Write a decoder with a manifest; gives the network."""
    torch.manual_seed(0)
    config = DecoderConfig.model_validate(DECODER.model_dump() | changed)
    model = Decoder(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.to(dtype))
    folder.mkdir(exist_ok=True)
    tensors = ((name, parameter.to(dtype)) for name, parameter in model.named_parameters())
    save_checkpoint(folder, config, tensors, dtype=str(dtype).removeprefix("torch."))
    write_manifest(folder, "checkpoint", {})
    return model


def resnet(folder: Path, config: ResNetConfig | None = None) -> ResNet:
    """Write a classifier of 12×12 images; gives the network."""
    torch.manual_seed(0)
    config = config or cifar_resnet(8, width=16, in_channels=1)
    model = ResNet(config).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)  # pyright: ignore[reportArgumentType]
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)  # pyright: ignore[reportArgumentType]
    labels = tuple(map(str, range(config.num_classes)))
    vision = ClassifierConfig(model=config, image_size=(12, 12), mean=(0.5,), std=(0.5,), labels=labels)
    folder.mkdir(exist_ok=True)
    save_classifier(folder, vision, model, {})
    return model


def prune(
    source: Path, into: Path, data: Data | None = None, /, progress: Progress | None = None, **step: Any
) -> dict[str, Any]:
    """Prune `source` into the new folder `into`."""
    into.mkdir()
    pruner: Pruner = family_at(source).need("pruner", "pruned")
    return prune_checkpoint(source, into, Prune.model_validate(step), pruner, data, progress or Silent())


def masked(model: Any, record: dict[str, Any], groups: Any) -> Any:
    """A copy of the dense `model` with the units of `record` at zero."""
    from penjing.compress.prune.surgery import mask

    twin = copy.deepcopy(model)
    by_name = {group.name: group for group in groups}
    mask(twin, [(by_name[row["name"]], row["removed"]) for row in record["groups"]])
    return twin
