"""Two towers: an image network and a text encoder whose vectors of equal things lie close (Radford et al.,
https://arxiv.org/abs/2103.00020)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.graph.config import Filter, Fit, Pixels
from penjing.core.models.encoder import Encoder
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.vision.paired import ImageTransformer, TextTransformer
from penjing.core.vision.paired_config import ImageTransformerConfig, TextTransformerConfig

LARGEST_SCALE = math.log(100.0)  # of the softmax's logits, as CLIP bounds it


class TowersConfig(Config):
    """Everything that fixes the computation of `TwoTowers`, and how pixels enter it.

    An image enters as (pixel / 255 - mean) / std, per channel; see `Pixels` for `fit`, `resize` and `filter`.
    """

    penjing_family: Literal["towers"] = Field(default="towers", description="What kind of network it is.")
    image: ResNetConfig | ImageTransformerConfig = Field(
        description="The image tower; a ResNet's classes are the numbers of a vector."
    )
    image_size: tuple[int, int] = Field(description="Height and width of an image in pixels.")
    mean: tuple[float, ...] = Field(description="Mean of each channel, of values from 0 to 1.")
    std: tuple[float, ...] = Field(description="Standard deviation of each channel, of values from 0 to 1.")
    fit: Fit = Field(default="stretch", description="What becomes of an image of another shape.")
    resize: tuple[int, int] | None = Field(default=None, description="Its size before its middle is cut out.")
    filter: Filter = Field(default="bilinear", description="How pixels between are found.")
    text: EncoderConfig | TextTransformerConfig = Field(description="The text tower.")
    loss: Literal["clip", "siglip"] = Field(description='What it has learnt by; "siglip" has a bias.')

    @property
    def dimension(self) -> int:
        """Numbers of a vector."""
        return self.image.num_classes if isinstance(self.image, ResNetConfig) else self.image.dimension

    @property
    def channels(self) -> int:
        """Channels of an image."""
        return self.image.in_channels if isinstance(self.image, ResNetConfig) else self.image.num_channels

    @property
    def pixels(self) -> Pixels:
        """How an image becomes the input of the image tower."""
        height, width = self.image_size
        return Pixels(
            height=height, width=width, mean=self.mean, std=self.std, order="L" if self.channels == 1 else "RGB",
            fit=self.fit, resize=self.resize, filter=self.filter,
        )  # fmt: skip


class Seen(NamedTuple):
    """What `TwoTowers` makes of N pairs: vectors of length 1, (N, D) each, float32 or wider; the factor and the bias of
    their products as logits, scalars. All are differentiable."""

    images: Tensor
    texts: Tensor
    scale: Tensor
    bias: Tensor


class TwoTowers(nn.Module):
    """Images (N, C, H, W) and texts of N pairs → `Seen`."""

    def __init__(self, config: TowersConfig):
        super().__init__()
        self.config = config
        image = config.image
        self.image = ResNet(image) if isinstance(image, ResNetConfig) else ImageTransformer(image)
        self.text = text_tower(config.text)
        filled = isinstance(config.text, TextTransformerConfig) and config.text.pooling == "last"
        self.text_projection = nn.Linear(config.text.hidden_size, config.dimension, bias=filled)
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.logit_bias = nn.Parameter(torch.zeros(())) if config.loss == "siglip" else None

    def forward(
        self, images: Tensor, tokens_NT: Tensor | None = None, mask_NT: Tensor | None = None,
        features_NH: Tensor | None = None,
    ) -> Seen:  # fmt: skip
        """
        Args:
            images: normalised, in the dtype of the parameters.
            tokens_NT, mask_NT: see `Encoder`.
            features_NH: what `self.text` makes of the texts, where that is known; tokens are not asked for then.
        """
        scale = self.logit_scale.exp()
        bias = torch.zeros_like(scale) if self.logit_bias is None else self.logit_bias
        features = self.text(tokens_NT, mask_NT) if features_NH is None else features_NH
        return Seen(self.of_images(images), self.of_features(features), scale, bias)

    def of_images(self, images: Tensor) -> Tensor:
        """(N, D) vectors of images."""
        return _unit(self.image(images))

    def of_features(self, features_NH: Tensor) -> Tensor:
        """(N, D) vectors of what the text tower says."""
        return _unit(self.text_projection(features_NH))


def text_tower(config: EncoderConfig | TextTransformerConfig) -> Encoder | TextTransformer:
    """The network of texts, called with token ids and their mask (N, T)."""
    return Encoder(config) if isinstance(config, EncoderConfig) else TextTransformer(config)


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)
