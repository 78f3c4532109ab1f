"""Two towers: an image network and a text encoder whose vectors of equal things lie close (Radford et al.,
https://arxiv.org/abs/2103.00020)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.models.encoder import Encoder
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.vision.graph_eyes import GraphTower, GraphTowerConfig
from penjing.core.vision.paired import ImageTransformer, TextTransformer
from penjing.core.vision.paired_config import ImageTransformerConfig, TextTransformerConfig
from penjing.core.vision.towers_config import TowersConfig

LARGEST_SCALE = math.log(100.0)  # of the softmax's logits, as CLIP bounds it


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
        self.image = image_network_of(image)
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


def image_network_of(config: ResNetConfig | ImageTransformerConfig | GraphTowerConfig) -> nn.Module:
    """The network of images, whose vectors have any length."""
    if isinstance(config, ResNetConfig):
        return ResNet(config)
    return GraphTower(config) if isinstance(config, GraphTowerConfig) else ImageTransformer(config)


def text_tower(config: EncoderConfig | TextTransformerConfig) -> Encoder | TextTransformer:
    """The network of texts, called with token ids and their mask (N, T)."""
    return Encoder(config) if isinstance(config, EncoderConfig) else TextTransformer(config)


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.to(torch.promote_types(vectors.dtype, torch.float32)), dim=-1)


class ImageTower(nn.Module):
    """Normalised images (N, C, height, width) → vectors (N, D) of length 1."""

    def __init__(self, towers: TwoTowers) -> None:
        super().__init__()
        self.tower = towers.image

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return F.normalize(self.tower(images), dim=-1)


class TextTower(nn.Module):
    """Token ids and their mask (N, T) → vectors (N, D) of length 1."""

    def __init__(self, towers: TwoTowers) -> None:
        super().__init__()
        self.tower, self.projection = towers.text, towers.text_projection

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See the class."""
        return F.normalize(self.projection(self.tower(input_ids, attention_mask)), dim=-1)
