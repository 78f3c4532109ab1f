"""Architecture of a BERT-style text encoder, under the names that `config.json` of Hugging Face gives it."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from penjing.core.config import Config, parse_config
from penjing.core.errors import ConfigError, InputError

MODEL_TYPE = "bert"
# What the computation does not depend on: training, bookkeeping, the head of another task.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("gelu",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
}


class EncoderConfig(Config):
    """Everything that fixes the computation of an `Encoder`."""

    vocab_size: int = Field(gt=0, description="Tokens of the vocabulary.")
    hidden_size: int = Field(gt=0, description="Size of a token's hidden state.")
    num_hidden_layers: int = Field(gt=0, description="How many layers it has.")
    num_attention_heads: int = Field(gt=0, description="Heads.")
    intermediate_size: int = Field(gt=0, description="Inner width of the MLP.")
    max_position_embeddings: int = Field(gt=0, description="Longest text in tokens.")
    type_vocab_size: int = Field(gt=0, description="Kinds of segments.")
    layer_norm_eps: float = Field(gt=0, description="Added to the variance before its root.")

    @model_validator(mode="after")
    def _heads_divide(self) -> EncoderConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads={self.num_attention_heads}"
            )
        return self


def encoder_config_from_hf(values: dict[str, Any], source: str) -> EncoderConfig:
    """The content of a BERT model's `config.json`.

    Raises:
        InputError: another architecture, or a value that `Encoder` does not compute with.
    """
    if values.get("model_type") != MODEL_TYPE:
        raise InputError(f"{source}: model_type is {values.get('model_type')!r}; text encoders are {MODEL_TYPE!r}")
    for key, known in _FIXED.items():
        if key in values and values[key] not in known:
            raise InputError(f"{source}: {key}={values[key]!r} is not supported; it must be {known[0]!r}")
    chosen = {name: values[name] for name in EncoderConfig.model_fields if name in values}
    try:
        return parse_config(EncoderConfig, chosen, source)
    except ConfigError as error:
        raise InputError(f"{error}; the file is damaged, or of another kind of model") from None


def encoder_config_to_hf(config: EncoderConfig) -> dict[str, Any]:
    """What `encoder_config_from_hf` and transformers read."""
    fixed = {key: known[0] for key, known in _FIXED.items() if known[0]}
    return {"architectures": ["BertModel"], "model_type": MODEL_TYPE, **config.model_dump(), **fixed}
