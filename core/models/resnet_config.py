"""Architecture of a residual network: every width of its own, so that a pruned network is an ordinary one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config


class BlockConfig(Config):
    """One residual block: channels between its convolutions (one number if basic, two if bottleneck), and its
    stride."""

    hidden: tuple[int, ...] = Field(
        min_length=1, max_length=2, description="Output channels of each convolution but the last."
    )
    stride: Literal[1, 2] = Field(default=1, description="Of the convolution that shrinks the image.")
    projection: bool = Field(
        default=False,
        description="Whether the shortcut is a convolution though the shape stays: pruning may make widths equal.",
    )


class StageConfig(Config):
    """Blocks that share one residual width, `channels`."""

    channels: int = Field(gt=0, description="Output channels of each block.")
    blocks: tuple[BlockConfig, ...] = Field(min_length=1, description="Its blocks in order.")


class ResNetConfig(Config):
    """Everything that fixes the computation of a `ResNet`; use the functions below for the published ones."""

    model_type: Literal["resnet"] = Field(default="resnet", description="Kind of network.")
    num_classes: int = Field(gt=0, description="Classes.")
    in_channels: int = Field(default=3, gt=0, description="Channels of an image.")
    stem: Literal["cifar", "imagenet"] = Field(
        description='"cifar" is 3×3; "imagenet" is 7×7 with stride 2 and a 3×3 max pool with stride 2.'
    )
    stem_channels: int = Field(gt=0, description="Output channels of the first convolution.")
    block: Literal["basic", "bottleneck"] = Field(description="Kind of block.")
    groups: int = Field(default=1, gt=0, description="Groups of a bottleneck's 3×3 convolution (ResNeXt).")
    stages: tuple[StageConfig, ...] = Field(min_length=1, description="Blocks of one image size each.")

    @model_validator(mode="after")
    def _widths_fit(self) -> ResNetConfig:
        wanted = 1 if self.block == "basic" else 2
        for index, stage in enumerate(self.stages):
            for block in stage.blocks:
                if len(block.hidden) != wanted or min(block.hidden) < 1:
                    raise ValueError(
                        f"stage {index}: hidden={block.hidden}, a {self.block} block needs {wanted} positive widths"
                    )
                if self.block == "bottleneck" and any(width % self.groups for width in block.hidden):
                    raise ValueError(f"stage {index}: hidden={block.hidden} is not divisible by groups={self.groups}")
        if self.block == "basic" and self.groups != 1:
            raise ValueError(f"groups={self.groups}: only bottleneck blocks have groups; write 1")
        return self


def cifar_resnet(depth: int, num_classes: int = 10, *, width: int = 16, in_channels: int = 3) -> ResNetConfig:
    """The networks for small images of He et al., section 4.2: depth = 6·n + 2 (8, 14, 20, 32, 44, 56), three stages.

    Raises:
        ValueError: another depth.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"depth={depth} is not 6·n + 2; take 8, 14, 20, 32, 44 or 56")
    blocks = (depth - 2) // 6
    stages = tuple(_stage(width << index, (width << index,), blocks, 1 if index == 0 else 2) for index in range(3))
    return ResNetConfig(
        num_classes=num_classes,
        in_channels=in_channels,
        stem="cifar",
        stem_channels=width,
        block="basic",
        stages=stages,
    )


def imagenet_resnet(
    depth: int, num_classes: int = 1000, *, groups: int = 1, width_per_group: int = 64, in_channels: int = 3
) -> ResNetConfig:
    """ResNet-18, 34, 50, 101 or 152 for 224×224 images; ResNeXt-50 32×4d is depth 50, groups 32, width_per_group 4,
    ResNeXt-101 32×8d depth 101, groups 32, width_per_group 8.

    The stride of a bottleneck is in its 3×3 convolution, as everywhere after the paper ("v1.5").

    Raises:
        ValueError: another depth.
    """
    third = {18: 2, 34: 6, 50: 6, 101: 23, 152: 36}.get(depth)  # table 1 of the paper
    if third is None:
        raise ValueError(f"depth={depth} is not one of 18, 34, 50, 101, 152")
    counts = (2, 2, 2, 2) if depth == 18 else (3, 8 if depth == 152 else 4, third, 3)
    bottleneck = depth >= 50
    stages = []
    for index, count in enumerate(counts):
        plain = 64 << index
        inner = (groups * width_per_group << index,) * 2 if bottleneck else (plain,)
        stages.append(_stage(4 * plain if bottleneck else plain, inner, count, 1 if index == 0 else 2))
    return ResNetConfig(
        num_classes=num_classes,
        in_channels=in_channels,
        stem="imagenet",
        stem_channels=64,
        block="bottleneck" if bottleneck else "basic",
        groups=groups,
        stages=tuple(stages),
    )


def _stage(channels: int, hidden: tuple[int, ...], num_blocks: int, stride: Literal[1, 2]) -> StageConfig:
    blocks = [BlockConfig(hidden=hidden, stride=stride), *[BlockConfig(hidden=hidden)] * (num_blocks - 1)]
    return StageConfig(channels=channels, blocks=tuple(blocks))
