"""The recipe's [model]: what is trained from the beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from penjing.core.config import Config
from penjing.core.family import FamilyName
from penjing.core.images.sound import Sound
from penjing.core.models.config import DecoderConfig
from penjing.core.vision.projector import ProjectorConfig
from penjing.core.vision.vit import ViTConfig


class DecoderModel(DecoderConfig):
    """A decoder language model; token ids of begin and end come from the tokenizer."""

    family: ClassVar[FamilyName] = "decoder"

    architecture: Literal["decoder"] = Field(description="A decoder language model.")
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of the first weights.")


class ResNetModel(Config):
    """A residual network for images; classes come from the data."""

    family: ClassVar[FamilyName] = "classifier"

    architecture: Literal["resnet"] = Field(description="A residual network for images.")
    variant: Literal["cifar", "imagenet"] = Field(
        default="cifar",
        description='"cifar" is for small images (depth 6·n + 2), "imagenet" has depth 18, 34, 50, 101 or 152.',
    )
    depth: int = Field(description="Layers with weights, of those that the variant allows.")
    width: int = Field(default=16, gt=0, description='Channels of the first stage of "cifar".')
    groups: int = Field(
        default=1, gt=0, description='Groups of a bottleneck\'s 3×3 convolution (ResNeXt), of "imagenet".'
    )
    width_per_group: int = Field(
        default=64, gt=0, description='Channels of a group of a bottleneck\'s 3×3 convolution, of "imagenet".'
    )


class ViTTower(Config):
    """A vision transformer as CLIP has it, which begins anew."""

    architecture: Literal["vit"] = Field(description="A vision transformer, which begins anew.")
    patch_size: int = Field(gt=0, description="Rows and columns of a patch in pixels.")
    hidden_size: int = Field(gt=0, description="Size of a patch's hidden state.")
    intermediate_size: int = Field(gt=0, description="Inner width of the MLP.")
    num_hidden_layers: int = Field(gt=0, le=1024, description="How many layers it has.")
    num_attention_heads: int = Field(gt=0, description="Heads of attention in each layer.")


class GraphTower(Config):
    """Any network of images, with its weights."""

    architecture: Literal["graph"] = Field(description="Any network of images, with the weights that it came with.")
    folder: Path = Field(
        description="A network that 'penjing import' made, or a classifier's checkpoint; data.height, width and "
        "channels are its own."
    )
    node: str | None = Field(
        default=None,
        description="Whose result it ends in, by the name that 'penjing graph' shows; places and tokens are averaged. "
        "none: its output.",
    )


class TowersModel(Config):
    """An image network and a text encoder whose vectors of what belongs together lie close."""

    family: ClassVar[FamilyName] = "towers"

    architecture: Literal["towers"] = Field(description="An image network beside a text encoder.")
    image: Annotated[ResNetModel | ViTTower | GraphTower, Field(discriminator="architecture")] = Field(
        description="The image network; it ends in a vector in place of classes."
    )
    text: Path = Field(
        description="A checkpoint of a text encoder, whose weights the text tower begins with; freeze = ['text.*'] "
        "keeps them, and its vectors are then computed once."
    )
    dimension: int = Field(default=256, gt=0, description="Numbers of a vector.")


class VisionLanguageModel(Config):
    """A decoder that sees: rows of a vision transformer stand in place of image tokens."""

    family: ClassVar[FamilyName] = "vision_language"

    architecture: Literal["vision-language"] = Field(description="A decoder beside a vision transformer.")
    decoder: Path = Field(description="A checkpoint of a decoder, whose weights and tokenizer it begins with.")
    vision: ViTConfig | None = Field(default=None, description="A vision transformer, which begins anew.")
    resnet: ResNetModel | None = Field(
        default=None, description="In place of vision: a residual network, which begins anew, of images of resnet_size."
    )
    resnet_size: int = Field(default=56, gt=0, description="Rows and columns of the images of `resnet`.")
    graph: Path | None = Field(
        default=None,
        description="In place of vision: any network of images that 'penjing import' made, or a classifier's "
        "checkpoint, with its weights.",
    )
    node: str | None = Field(
        default=None,
        description="Of graph: whose result becomes rows, by the name that 'penjing graph' shows; none: the last one "
        "with rows and columns or tokens.",
    )
    scale_factor: int = Field(
        default=2, gt=0, description="So many rows and columns of patches become one row for the decoder."
    )
    projector: ProjectorConfig = Field(
        default=ProjectorConfig(), description="What makes rows of joined patches, which begins anew."
    )
    sound: Sound | None = Field(
        default=None,
        description="What enters are recordings (WAV), which the transformer sees as spectrograms: image_size bands of "
        "pitch and as many moments; none: images.",
    )
    image_token: str = Field(
        default="<image>", min_length=1, description="What the tokenizer calls an image's rows; added if it is new."
    )

    @model_validator(mode="after")
    def _one_encoder(self) -> VisionLanguageModel:
        given = [name for name in ("vision", "resnet", "graph") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"one of vision, resnet and graph is what it sees with; got {' and '.join(given) or 'none'}"
            )
        if self.node is not None and self.graph is None:
            raise ValueError("node names a result of graph; leave it out")
        return self
