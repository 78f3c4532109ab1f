"""A decoder that sees: a vision transformer, pixel shuffle and a projector give rows that stand in place of image
tokens, as in Idefics3 and SmolVLM (Laurençon et al., https://arxiv.org/abs/2408.12637), and in LLaVA (Liu et al.,
https://arxiv.org/abs/2310.03744).

Shapes: N images, R rows of each, B texts of T tokens, E hidden of the decoder.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator
from torch import Tensor, nn

from penjing.core.config import Config
from penjing.core.images.tiles import MOST_A_SIDE, Look
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Decoder
from penjing.core.vision.graph_eyes import GraphEyes, GraphEyesConfig
from penjing.core.vision.projector import ProjectorConfig, build_projector
from penjing.core.vision.vit import VisionTransformer, ViTConfig


def _kind(value: Any) -> str:
    found = value.get("kind", "vit") if isinstance(value, dict) else getattr(value, "kind", "vit")
    return "graph" if found == "graph" else "vit"


Encoder = Annotated[Annotated[ViTConfig, Tag("vit")] | Annotated[GraphEyesConfig, Tag("graph")], Discriminator(_kind)]
"""A vision transformer of ours, or any network as a graph."""


def build_encoder(config: ViTConfig | GraphEyesConfig) -> VisionTransformer | GraphEyes:
    """The network (N, C, H, W) → (N, P, E) that `config` describes."""
    return VisionTransformer(config) if isinstance(config, ViTConfig) else GraphEyes(config)


class VisionLanguageConfig(Config):
    """Everything that fixes the computation of a `VisionLanguage`."""

    vision: Encoder = Field(description="What sees: a vision transformer, or any network of images as a graph.")
    decoder: DecoderConfig = Field(description="The decoder; its vocabulary has the image token.")
    scale_factor: int = Field(gt=0, description="So many rows and columns of patches become one row.")
    projector: ProjectorConfig = Field(default=ProjectorConfig(), description="What makes rows of joined patches.")
    image_token_id: int = Field(ge=0, description="The token in whose place a row of an image stands.")
    look: Look = Field(default=Look(), description="How an image becomes what the transformer is given.")

    @model_validator(mode="after")
    def _fits(self) -> VisionLanguageConfig:
        if isinstance(self.vision, GraphEyesConfig):
            if not self.vision.side or self.vision.image_size != self.vision.image_width:
                raise ValueError(
                    f"the encoder makes {self.vision.places} places of an image of {self.vision.image_size} x "
                    f"{self.vision.image_width} pixels; both must be squares"
                )
            if self.look.tiles:
                raise ValueError("an encoder that is a graph sees whole images; set tiles to 0")
        if self.vision.side % self.scale_factor:
            raise ValueError(
                f"{self.vision.side} patches of a side cannot be joined {self.scale_factor} at a time; "
                "take a scale_factor that divides them"
            )
        if self.look.tiles > MOST_A_SIDE * self.vision.image_size:
            raise ValueError(
                f"tiles={self.look.tiles} cuts an image into more than {MOST_A_SIDE} squares of "
                f"{self.vision.image_size} pixels a side; scale it less"
            )
        if self.look.sound is not None and (self.vision.num_channels != 1 or self.look.tiles):
            raise ValueError("a spectrogram has one channel and is seen whole; set vision.num_channels = 1")
        if self.image_token_id >= self.decoder.vocab_size:
            raise ValueError(
                f"image_token_id={self.image_token_id} is none of the decoder's {self.decoder.vocab_size} tokens"
            )
        if self.decoder.token_inputs:
            raise ValueError("a decoder that sees has no token_inputs, because rows of an image are of no token")
        return self

    @property
    def rows(self) -> int:
        """Tokens that an image takes."""
        return (self.vision.side // self.scale_factor) ** 2


class VisionLanguage(nn.Module):
    """Tokens and images → logits of the next token."""

    def __init__(self, config: VisionLanguageConfig):
        super().__init__()
        self.config = config
        self.vision = build_encoder(config.vision)
        inner = config.vision.hidden_size * config.scale_factor**2
        self.projector = build_projector(config.projector, inner, config.decoder.hidden_size)
        self.decoder = Decoder(config.decoder)

    def see(self, images: Tensor) -> Tensor:
        """Normalised images (N, C, H, W) → rows (N, R, E)."""
        return self.projector(pixel_shuffle(self.vision(images), self.config.scale_factor))

    def forward(
        self,
        tokens_BT: Tensor,
        images: Tensor | None = None,
        logit_rows: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """
        Args:
            tokens_BT: int64, with `image_token_id` R times for each image that a text has.
            images: (N, C, H, W), in the dtype of the parameters; None: the texts have none.
            logit_rows: see `Decoder`.
            seen: (M,) int64, which of the images stands there each time; all N in their order when None.
        """
        if images is None:
            return self.decoder(tokens_BT, logit_rows=logit_rows)
        rows = self.see(images)
        rows = rows if seen is None else rows[seen]
        return self.decoder(tokens_BT, logit_rows=logit_rows, embedded=self.merged(tokens_BT, rows))

    def merged(self, tokens_BT: Tensor, rows_NRE: Tensor) -> Tensor:
        """(B, T, E): embeddings of the tokens, and the rows in place of image tokens."""
        embedded = self.decoder.model.embed(tokens_BT)
        here = (tokens_BT == self.config.image_token_id)[..., None]
        return embedded.masked_scatter(here, rows_NRE.to(embedded.dtype))


def pixel_shuffle(x_NPE: Tensor, factor: int) -> Tensor:
    """The hidden states of `factor` × `factor` patches as one of factor² times the size: (N, P / factor²,
    E × factor²)."""
    number, patches, size = x_NPE.shape
    side = round(patches**0.5)
    few = side // factor
    x = x_NPE.view(number, few, factor, few, factor, size).transpose(2, 3)
    return x.reshape(number, few * few, factor * factor * size)
