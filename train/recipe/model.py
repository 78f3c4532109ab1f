"""The recipe's [model]: what is trained from the beginning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penjing.core.config import Config
from penjing.core.models.config import DecoderConfig


class DecoderModel(DecoderConfig):
    """A decoder language model; token ids of begin and end come from the tokenizer."""

    architecture: Literal["decoder"]
    init_std: float = Field(default=0.02, gt=0)


class ResNetModel(Config):
    """A residual network: "cifar" for small images (depth 6·n + 2), "imagenet" (18, 34, 50); classes come from the
    data."""

    architecture: Literal["resnet"]
    variant: Literal["cifar", "imagenet"] = "cifar"
    depth: int
    width: int = Field(default=16, gt=0)  # cifar: channels of the first stage
    groups: int = Field(default=1, gt=0)  # imagenet: of a bottleneck's 3×3 convolution (ResNeXt)
    width_per_group: int = Field(default=64, gt=0)
