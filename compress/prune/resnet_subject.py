"""A residual network's checkpoint as what pruning takes; every block has widths of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from penjing.compress.measure.skeleton import BATCH
from penjing.compress.prune.graph import Group
from penjing.compress.prune.ranking import Choice
from penjing.compress.prune.subject import Part, Shapes
from penjing.compress.prune.surgery import Cut
from penjing.core.checkpoint.classifier import WEIGHTS, classifier_skeleton, load_classifier, save_classifier
from penjing.core.errors import InputError
from penjing.core.manifest import verify
from penjing.core.models.resnet import Block, ConvNorm, ResNet
from penjing.core.models.resnet_config import BlockConfig, ResNetConfig, StageConfig


class ResNetSubject:
    """See `Subject`.

    Raises:
        InputError: the folder is no checkpoint of a classifier, is damaged, or holds NaN; names the tensor.
    """

    unit: str = "image"
    inputs = BATCH
    dropped: tuple[int, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kept_whole: dict[str, str] = {}
        self.dense: nn.Module
        self.dense, self._vision = classifier_skeleton(folder)
        self.model: nn.Module = self.dense
        verify(folder)
        for name in self.dense.state_dict():
            if not torch.isfinite(self._stored(name)).all():
                raise InputError(
                    f"{folder}: {name} holds NaN or infinity; its training diverged: take an earlier checkpoint"
                )
        self._parameters = {name for name, _ in self.dense.named_parameters()}
        self.example = (torch.empty(BATCH, self._config.in_channels, *self._vision.image_size, device="meta"),)

    @property
    def _config(self) -> ResNetConfig:
        return self._vision.model

    def weights(self, name: str) -> Tensor | None:
        """See `Subject`."""
        return self._stored(name) if name in self._parameters else None

    def network(self) -> nn.Module:
        """See `Subject`."""
        return load_classifier(self.folder)[0]

    def parts(self, groups: Sequence[Group]) -> dict[Part, list[Group]]:
        """See `Subject`: everything is channels."""
        return {"channels": list(groups)}

    def config_of(self, shapes: Shapes, choice: Choice) -> ResNetConfig:
        """See `Subject`."""
        dense = self.dense
        assert isinstance(dense, ResNet)
        width = shapes["stem.conv.weight"][0]
        stages, index, stem = [], 0, width
        for stage in self._config.stages:
            blocks = []
            for block in stage.blocks:
                name, module = f"blocks.{index}", dense.blocks[index]
                assert isinstance(module, Block)
                *hidden, channels = (
                    shapes[f"{name}.layers.{layer}.conv.weight"][0] for layer in range(len(module.layers))
                )
                # Widths that pruning made equal must not turn the shortcut's convolution into nothing.
                projection = isinstance(module.shortcut, ConvNorm) and width == channels and block.stride == 1
                blocks.append(BlockConfig(hidden=tuple(hidden), stride=block.stride, projection=projection))
                width, index = channels, index + 1
            stages.append(StageConfig(channels=width, blocks=tuple(blocks)))
        return ResNetConfig.model_validate(
            self._config.model_dump() | {"stem_channels": stem, "stages": [stage.model_dump() for stage in stages]}
        )

    def build(self, config: ResNetConfig) -> nn.Module:
        """See `Subject`."""
        return ResNet(config).eval()

    def item_bytes(self, name: str) -> int:
        """See `Subject`."""
        return self._stored(name).element_size()

    def write(self, partial: Path, config: Any, cuts: Mapping[str, Cut], created_by: dict[str, Any]) -> None:
        """See `Subject`."""
        with torch.device("meta"):
            pruned = ResNet(config)
        stored = ((name, self._stored(name)) for name in pruned.state_dict())
        kept = {name: cuts[name].of(tensor) if name in cuts else tensor for name, tensor in stored}
        pruned.load_state_dict(kept, assign=True)
        vision = self._vision.model_copy(update={"model": config})
        save_classifier(partial, vision, pruned, created_by)

    def _stored(self, name: str) -> Tensor:
        """Read now: one tensor is in memory at a time."""
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            return file.get_tensor(name)
