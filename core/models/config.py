"""Architecture of a Llama-family decoder, under the field names of Hugging Face `config.json`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penjing.core.config import Config


class RopeScaling(Config):
    """Rotary frequency scaling: Llama 3 (`llama3`), `linear`, or none (`default`)."""

    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = Field(default=1.0, gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_max_position_embeddings: int = Field(default=8192, gt=0)


class DecoderConfig(Config):
    """Everything that fixes a decoder's computation; sizes in elements, positions in tokens."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # bias on q, k, v (Qwen2: true)
    attention_output_bias: bool = False  # bias on the output projection (Llama with attention_bias: true)
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k before the rotary embedding (Qwen3)
    sliding_window: int | None = Field(default=None, gt=0)  # keys a query sees, itself included
    sliding_window_layers: tuple[int, ...] | None = None  # None: every layer, when sliding_window is set
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for the rotary embedding")
        return self

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of `layer` in tokens, or None for full attention."""
        if self.sliding_window is None:
            return None
        if self.sliding_window_layers is not None and layer not in self.sliding_window_layers:
            return None
        return self.sliding_window
