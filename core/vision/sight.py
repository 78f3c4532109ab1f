"""What a decoder that sees has beside its decoder, for inference: an encoded image → the rows that stand for it.

Shapes: R rows of an image, E hidden of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.graph.config import Pixels
from penjing.core.images.decode import (
    FORMATS,
    MAX_PIXELS,
    arranged,
    decode_image,
    decode_tiles,
    network_input,
    upright_size,
)
from penjing.core.images.sound import spectrogram
from penjing.core.images.tiles import UNCUT, Grid, Look, grid_of
from penjing.core.models.config import DecoderConfig
from penjing.core.text.tokenizer import Tokenizer
from penjing.core.vision.graph_eyes import GraphEyes
from penjing.core.vision.projector import ProjectorConfig
from penjing.core.vision.vision_language import Encoder, VisionLanguage, VisionLanguageConfig, pixel_shuffle
from penjing.core.vision.vit import VisionTransformer

HALF = 0.5  # where nothing is said, an image enters as (pixel / 255 - 0.5) / 0.5, as SigLIP's do
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
"""What Idefics3's processor writes around an image's tokens, and before those of a whole image."""
_ABOVE = (".mlp.fc2", "projector.linear_2")


class SightConfig(Config):
    """Everything that fixes the computation of a `Sight`."""

    vision: Encoder = Field(description="What sees: a vision transformer, or any network of images as a graph.")
    scale_factor: int = Field(gt=0, description="So many rows and columns of patches become one row.")
    projector: ProjectorConfig = Field(default=ProjectorConfig(), description="What makes rows of joined patches.")
    image_token_id: int = Field(ge=0, description="The token in whose place a row of an image stands.")
    width: int = Field(gt=0, description="Numbers of a row: the decoder's hidden size.")
    look: Look = Field(default=Look(), description="How an image becomes what the transformer is given.")
    linears: Literal["float32", "int8"] = Field(
        default="float32", description="How the linear layers of transformer and projection are computed."
    )

    @property
    def rows(self) -> int:
        """Tokens that an image takes."""
        return (self.vision.side // self.scale_factor) ** 2

    def whole(self, decoder: DecoderConfig) -> VisionLanguageConfig:
        """That of the whole model before `decoder`."""
        return VisionLanguageConfig(
            vision=self.vision,
            decoder=decoder,
            scale_factor=self.scale_factor,
            projector=self.projector,
            image_token_id=self.image_token_id,
            look=self.look,
        )

    @classmethod
    def of(cls, whole: VisionLanguageConfig) -> SightConfig:
        """That of a whole model."""
        return cls(
            vision=whole.vision,
            scale_factor=whole.scale_factor,
            projector=whole.projector,
            image_token_id=whole.image_token_id,
            width=whole.decoder.hidden_size,
            look=whole.look,
        )


class Sight(nn.Module):
    """An encoder of images, pixel shuffle and the projector behind them.

    `apply_image_invariance` makes the bits of an image's rows depend on nothing but the image and the threads of torch.
    """

    def __init__(self, config: SightConfig, vision: VisionTransformer | GraphEyes, projector: nn.Module) -> None:
        super().__init__()
        self.config, self.vision, self.projector = config, vision, projector

    @classmethod
    def of(cls, model: VisionLanguage) -> Sight:
        """The parts of `model`, shared with it."""
        return cls(SightConfig.of(model.config), model.vision, model.projector)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) → rows (N, R, E)."""
        return self.projector(pixel_shuffle(self.vision(images), self.config.scale_factor))

    @torch.inference_mode()
    def rows_of(self, pictures: Sequence[NDArray[np.uint8]]) -> Tensor:
        """(N, R, E) float32 of what `pictures_of` gave."""
        pixels = pixels_of(self.config)
        values = network_input(np.stack([arranged(picture, pixels) for picture in pictures]), pixels)
        return self(torch.from_numpy(np.ascontiguousarray(values))).float().contiguous()


def grid_of_file(config: SightConfig, data: bytes, max_pixels: int = MAX_PIXELS) -> Grid:
    """The squares that an encoded image is cut into.

    Raises:
        InputError: see `pictures_of`; only what an image says of itself is read.
    """
    if not config.look.tiles:
        return UNCUT
    return grid_of(upright_size(data, max_pixels=max_pixels), config.look.tiles, config.vision.image_size)


def pictures_of(config: SightConfig, data: bytes, max_pixels: int = MAX_PIXELS) -> list[NDArray[np.uint8]]:
    """An encoded image at the model's size, (height, width, channels): its squares, and then the whole.

    Raises:
        InputError: it is no JPEG or PNG, broken, cut off, animated, or has more pixels than that.
    """
    if config.look.tiles:
        return decode_tiles(data, pixels_of(config), config.look.tiles, max_pixels=max_pixels)
    return [picture_of(config, data, max_pixels=max_pixels, still=True)]


def is_above(name: str) -> bool:
    """Whether the activations of the linear layer `name` of a `Sight` in INT8 have a zero point a patch: what a GELU
    gives lies above -0.17, and would leave half of the integers unused."""
    return name.endswith(_ABOVE)


def picture_of(
    config: SightConfig | VisionLanguageConfig,
    data: bytes,
    *,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
    still: bool = False,
) -> NDArray[np.uint8]:
    """The file of an image, or of a recording where the model hears, as (height, width, channels); see `decode_image`
    and `spectrogram`, where `max_pixels` are samples.

    Raises:
        InputError: see there.
    """
    if config.look.sound is not None:
        return spectrogram(data, config.look.sound, config.vision.image_size, max_samples=max_pixels)
    return decode_image(data, pixels_of(config), max_pixels=max_pixels, formats=formats, still=still)


def pixels_of(config: SightConfig | VisionLanguageConfig) -> Pixels:
    """How an image becomes the input of the vision transformer."""
    channels, side, look = config.vision.num_channels, config.vision.image_size, config.look
    half = (HALF,) * channels
    return Pixels(
        height=side, width=side, mean=look.mean or half, std=look.std or half, order="L" if channels == 1 else "RGB",
        fit=look.fit, resize=look.resize, filter=look.filter,
    )  # fmt: skip


def image_text(tokenizer: Tokenizer, token: str, rows: int, grid: Grid = UNCUT) -> str:
    """What stands in a text for one image whose every piece has so many rows: image tokens, and around them what
    Idefics3's processor writes, where the tokenizer has it."""
    text = token * rows
    if tokenizer.token_to_id(AROUND) is None or tokenizer.token_to_id(WHOLE) is None:
        return text * grid.pieces
    whole = f"{AROUND}{WHOLE}{text}{AROUND}"
    if grid.pieces == 1:
        return whole
    lines = [
        "".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{text}" for column in range(grid.columns)) + "\n"
        for row in range(grid.rows)
    ]
    return "".join([*lines, "\n", whole])
