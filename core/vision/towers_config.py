"""What fixes the computation of two towers, and how images enter them; without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penjing.core.config import Config
from penjing.core.graph.config import Filter, Fit, Pixels
from penjing.core.models.encoder_config import EncoderConfig
from penjing.core.models.resnet_config import ResNetConfig
from penjing.core.vision.graph_eyes import GraphTowerConfig
from penjing.core.vision.paired_config import ImageTransformerConfig, TextTransformerConfig


class TowersConfig(Config):
    """Everything that fixes the computation of `TwoTowers`, and how pixels enter it.

    An image enters as (pixel / 255 - mean) / std, per channel; see `Pixels` for `fit`, `resize` and `filter`.
    """

    penjing_family: Literal["towers"] = Field(default="towers", description="What kind of network it is.")
    image: ResNetConfig | ImageTransformerConfig | GraphTowerConfig = Field(
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
        image = self.image.eyes if isinstance(self.image, GraphTowerConfig) else self.image
        return image.in_channels if isinstance(image, ResNetConfig) else image.num_channels

    @property
    def is_paired(self) -> bool:
        """Whether the towers are those of CLIP or SigLIP, and their folder is in Hugging Face's layout."""
        return isinstance(self.text, TextTransformerConfig)

    @property
    def pixels(self) -> Pixels:
        """How an image becomes the input of the image tower."""
        height, width = self.image_size
        return Pixels(
            height=height, width=width, mean=self.mean, std=self.std, order="L" if self.channels == 1 else "RGB",
            fit=self.fit, resize=self.resize, filter=self.filter,
        )  # fmt: skip
