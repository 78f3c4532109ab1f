"""The towers of CLIP and SigLIP: what fixes their computation; without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config

Activation = Literal["gelu_pytorch_tanh", "quick_gelu", "gelu"]


class TransformerConfig(Config):
    """What transformers of images and of texts have alike."""

    hidden_size: int = Field(gt=0, description="Size of a hidden state.")
    intermediate_size: int = Field(gt=0, description="Inner width of the MLP.")
    num_hidden_layers: int = Field(gt=0, le=1024, description="How many layers it has.")
    num_attention_heads: int = Field(gt=0, description="Heads.")
    layer_norm_eps: float = Field(gt=0, description="Added to the variance before its root.")
    activation: Activation = Field(description="Between the two layers of the MLP.")

    @model_validator(mode="after")
    def _heads_divide(self) -> TransformerConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
            )
        return self

    @property
    def attention_size(self) -> int:
        """Numbers of all heads of a token."""
        return self.hidden_size


class ImageTransformerConfig(TransformerConfig):
    """Everything that fixes the computation of an `ImageTransformer`."""

    image_size: int = Field(gt=0, le=1 << 14, description="Rows and columns of an image in pixels.")
    patch_size: int = Field(gt=0, description="Rows and columns of a patch; what is left of an image is not seen.")
    num_channels: int = Field(gt=0, description="Channels of an image.")
    pooling: Literal["class", "attention"] = Field(
        description="class: a vector beside the patches, which a projection follows, as CLIP has it; attention: one "
        "question to all patches, as SigLIP has it."
    )
    dimension: int = Field(gt=0, description="Numbers of an image's vector.")

    @model_validator(mode="after")
    def _fits(self) -> ImageTransformerConfig:
        if self.patch_size > self.image_size:
            raise ValueError(f"patch_size={self.patch_size} is larger than image_size={self.image_size}")
        if self.pooling == "attention" and self.dimension != self.hidden_size:
            raise ValueError(
                f"images become vectors of hidden_size={self.hidden_size} numbers and texts of {self.dimension}"
            )
        return self

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2


class TextTransformerConfig(TransformerConfig):
    """Everything that fixes the computation of a `TextTransformer`."""

    vocab_size: int = Field(gt=0, description="Tokens of the vocabulary.")
    max_position_embeddings: int = Field(gt=0, description="Longest text in tokens.")
    pooling: Literal["end", "last"] = Field(
        description="end: tokens see those before them, and the one that ends a text stands for it, as CLIP has it; "
        "last: all see each other, texts are filled up to the longest, and the last token stands for a text, as SigLIP "
        "has it."
    )
    end_token_id: int | None = Field(default=None, ge=0, description="The token that ends a text; none: the largest.")
    pad_token_id: int = Field(default=0, ge=0, description="The token that texts are filled up with.")

    @model_validator(mode="after")
    def _tokens_exist(self) -> TextTransformerConfig:
        for name, token in (("end_token_id", self.end_token_id), ("pad_token_id", self.pad_token_id)):
            used = name.startswith("end") == (self.pooling == "end")
            if used and token is not None and token >= self.vocab_size:
                raise ValueError(f"{name}={token} is none of the vocabulary's {self.vocab_size} tokens")
        return self
