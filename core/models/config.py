"""Architecture of a decoder, under the field names of Hugging Face `config.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penjing.core.config import Config
from penjing.core.layers.departures import check_departures, departures_of
from penjing.core.layers.settings import (
    LSH,
    MAX_HEAD_DIM,
    Flag,
    LatentAttentionConfig,
    MoEConfig,
    Number,
    RopeScaling,
    Whole,
)

LayerType = Literal["full_attention", "sliding_attention", "lsh_attention", "short_conv"]
Rotary = Literal["main", "local", "none"]


class DecoderConfig(Config):
    """Everything that fixes a decoder's computation; sizes in elements, positions in tokens."""

    # "penjing": any combination, in a config.json that only penjing reads
    model_type: Literal[
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "dots1",
        "deepseek_v2",
        "deepseek_v3",
        "penjing",
    ] = Field(default="llama", description='"penjing" is any combination, in a config.json that only penjing reads.')
    vocab_size: Whole = Field(gt=0, description="Tokens of the vocabulary.")
    hidden_size: Whole = Field(gt=0, description="Size of a token's hidden state.")
    intermediate_size: Whole = Field(gt=0, description="Inner width of the MLP, the largest where layers differ.")
    intermediate_sizes: tuple[Whole, ...] | None = Field(
        default=None, description="Inner width of each layer's MLP, as pruning leaves them; none: all alike."
    )
    num_hidden_layers: Whole = Field(gt=0, description="How many layers it has.")
    num_attention_heads: Whole = Field(gt=0, description="Heads of queries.")
    num_key_value_heads: Whole = Field(gt=0, description="Heads of keys and values, which queries share in groups.")
    head_dim: Whole = Field(gt=0, le=MAX_HEAD_DIM, description="Dimensions of a head.")
    max_position_embeddings: Whole = Field(gt=0, description="Longest context in tokens.")
    rms_norm_eps: Number = Field(default=1e-6, gt=0, description="Added to the mean square before its root.")
    rope_theta: Number = Field(default=10000.0, gt=0, description="Base of the rotary frequencies.")
    rope_scaling: RopeScaling = Field(
        default=RopeScaling(), description="How rotary frequencies are scaled for longer contexts."
    )
    tie_word_embeddings: Flag = Field(default=False, description="Whether the output layer is the embedding.")
    attention_bias: Flag = Field(default=False, description="Whether queries, keys and values have a bias (Qwen2).")
    attention_output_bias: Flag = Field(default=False, description="Whether the attention's output has a bias.")
    mlp_bias: Flag = Field(default=False, description="Whether the MLP's layers have a bias.")
    mlp_hadamard: Whole = Field(
        default=0, ge=0, description="Block of down_proj's input that a Hadamard transform rotates; 0: none."
    )
    table_hadamard: Whole = Field(
        default=0,
        ge=0,
        description="Block of channels that a Hadamard transform rotates behind the embedding and before the LM head, "
        "whose rows are in that basis; 0: none.",
    )
    qk_norm: Flag = Field(
        default=False,
        description="Whether queries and keys pass an RMSNorm over a head before they are rotated (Qwen3).",
    )
    qk_norm_over: Literal["head", "all"] = Field(
        default="head", description="What qk_norm spans: each head, or all heads of a token together (OLMo 2)."
    )
    qk_norm_rotated: Flag = Field(
        default=False, description="Whether qk_norm comes after the rotation (Hunyuan), not before it."
    )
    value_norm: Flag = Field(default=False, description="Whether values pass an RMSNorm over a head, too (Gemma 4).")
    norms: Literal["before", "around", "after"] = Field(
        default="before",
        description="Where attention and MLP have an RMSNorm: before them, before and after them (Gemma 3), or after "
        "them alone (OLMo 2); what comes after is applied to what is added to the residual.",
    )
    inner_norms: Flag = Field(
        default=False,
        description="Whether attention and MLP have an RMSNorm of what their last matrix reads (BitNet).",
    )
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2", "relu", "xielu"] = Field(
        default="silu",
        description="Of the MLP's gate; gelu_tanh is GELU by its tanh formula (Gemma), relu2 the square of what is "
        "positive (BitNet). Without a gate also gelu, relu, and xielu, with two learned numbers a layer (Apertus).",
    )
    mlp_gated: Flag = Field(
        default=True,
        description="Whether the MLP is down(activation(gate(x)) × up(x)); else it has no up (StarCoder2, Phi-2).",
    )
    parallel: Flag = Field(
        default=False,
        description="Whether a layer's MLP reads what its attention reads, and both are added (GPT-NeoX, Cohere).",
    )
    layer_scales: Flag = Field(
        default=False, description="Whether what leaves a layer is multiplied by a number of the layer's own (Gemma 4)."
    )
    token_inputs: Whole = Field(
        default=0,
        ge=0,
        description="Width of what each layer takes of a token besides, from a table of its own, and adds behind its "
        "MLP (Gemma 4 E2B); 0: nothing.",
    )
    shared_keys: Whole = Field(
        default=0,
        ge=0,
        description="The last so many layers have no keys and values: they read those of the last layer before them "
        "that sees as many tokens (Gemma 4 E2B).",
    )
    head_bias: Flag = Field(default=False, description="Whether the output layer has a bias (Phi-2).")
    attention_cap: Number | None = Field(
        default=None, gt=0, description="Scores of attention become cap × tanh(score / cap) (Gemma 2); none: they stay."
    )
    attention_sinks: Flag = Field(
        default=False,
        description="Whether each head has a learned score more in the sum that attention divides by (gpt-oss).",
    )
    attention_gate: Literal["head", "channel"] | None = Field(
        default=None,
        description="Whether what attention gives is multiplied by gates of what it reads, before its last matrix: one "
        "for each head (Laguna), or for each channel (Trinity); none: it is not.",
    )
    attention_gate_function: Literal["sigmoid", "softplus"] = Field(
        default="sigmoid", description="Of the gates of attention_gate: softplus may be above 1 (Laguna)."
    )
    logit_cap: Number | None = Field(default=None, gt=0, description="The same of the logits.")
    layer_rotary: tuple[Rotary, ...] | None = Field(
        default=None,
        description="How each layer rotates queries and keys: main as rope_theta and rope_scaling say, local by "
        "rope_local_theta (Gemma 3), none not at all (SmolLM3); none: all main.",
    )
    learned_positions: Flag = Field(
        default=False,
        description="Whether a table has a vector for each position, which is added to the token's (GPT-2); with "
        "layer_rotary none everywhere.",
    )
    rope_local_theta: Number = Field(
        default=10000.0, gt=0, description="Base of the rotary frequencies of local layers, which are not scaled."
    )
    rotary_pairs: Whole | None = Field(
        default=None,
        gt=0,
        description="Pairs of a head's dimensions that rotate, i and i + D/2 for the first so many i; none: all.",
    )
    rotary_local_pairs: Whole | None = Field(
        default=None, gt=0, description="The same of layers with local rotation; none: as rotary_pairs says."
    )
    sliding_window: Whole | None = Field(
        default=None, gt=0, description="Tokens that a query sees in a sliding layer, itself included."
    )
    layer_types: tuple[LayerType, ...] | None = Field(
        default=None,
        description="Attention of each layer, or short_conv, a gated convolution in its place (LFM2); a shorter list "
        "repeats; none: all slide if sliding_window is set.",
    )
    conv_taps: Whole = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Tokens that a layer of short_conv reads, its own included; 0: there is none.",
    )
    conv_bias: Flag = Field(default=False, description="Whether the layers of short_conv have biases.")
    sliding_windows: tuple[Whole, ...] | None = Field(
        default=None,
        description="Tokens that a query sees in each layer, where sliding layers differ, sliding_window being the "
        "most; 0 in layers that do not slide.",
    )
    lsh: LSH = Field(default=LSH(), description="Of the layers with lsh_attention.")
    moe: MoEConfig | None = Field(default=None, description="Experts in place of MLPs; none: plain MLPs.")
    latent_attention: LatentAttentionConfig | None = Field(
        default=None, description="Keys and values from one small vector; none: heads of their own."
    )
    shared_layers: Whole = Field(default=1, ge=1, description="The first so many layers use one set of weights.")
    bos_token_id: Whole | None = Field(default=None, description="Token that begins a text.")
    eos_token_ids: tuple[Whole, ...] = Field(default=(), description="Tokens that end a text.")
    pad_token_id: Whole | None = Field(default=None, description="Token that fills up a batch.")

    @model_validator(mode="before")
    @classmethod
    def _repeat_layer_types(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        types, layers = values.get("layer_types"), values.get("num_hidden_layers")
        if not isinstance(types, list | tuple) or not types or not isinstance(layers, int):
            return values
        types = tuple(types[layer % len(types)] for layer in range(layers)) if len(types) < layers else tuple(types)
        implied = "full_attention" if values.get("sliding_window") is None else "sliding_attention"
        return values | {"layer_types": None if types == (implied,) * layers else types}

    @model_validator(mode="after")
    def _heads_divide(self) -> DecoderConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for the rotary embedding")
        scaling = self.rope_scaling
        if scaling.rope_type == "yarn" and self.rope_theta == 1:
            raise ValueError("rope_theta=1: yarn needs another base, for then all pairs turn alike")
        if scaling.rope_type == "longrope":
            if min((*scaling.short_factor, *scaling.long_factor), default=0) <= 0:
                raise ValueError("short_factor must be numbers above 0, one for each pair of dimensions")
            if scaling.long_factor and len(scaling.long_factor) != len(scaling.short_factor):
                raise ValueError(
                    f"long_factor has {len(scaling.long_factor)} numbers, short_factor {len(scaling.short_factor)}"
                )
        return self

    @model_validator(mode="after")
    def _layer_types_fit(self) -> DecoderConfig:
        if self.layer_types is None:
            return self
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}"
            )
        slides = "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            raise ValueError("layer_types names sliding_attention; set sliding_window to the tokens that a query sees")
        if not slides and self.sliding_window is not None:
            raise ValueError(f"sliding_window={self.sliding_window}, but layer_types names no sliding_attention")
        return self

    @model_validator(mode="after")
    def _convolutions_fit(self) -> DecoderConfig:
        types = self.layer_types or ()
        there = "short_conv" in types
        if there != (self.conv_taps > 0):
            said = "a layer of" if there else "no"
            raise ValueError(f"conv_taps={self.conv_taps}, and layer_types names {said} short_conv")
        if set(types) == {"short_conv"}:
            raise ValueError("layer_types names short_conv alone; a layer with attention is needed besides")
        return self

    @model_validator(mode="after")
    def _sliding_windows_fit(self) -> DecoderConfig:
        sizes = self.sliding_windows
        if sizes is None:
            return self
        slides = [self.layer_type(layer) == "sliding_attention" for layer in range(self.num_hidden_layers)]
        if [size > 0 for size in sizes] != slides or max(sizes) != self.sliding_window:
            raise ValueError(
                f"sliding_windows={list(sizes)}: one number for each of the {self.num_hidden_layers} layers, 0 for "
                f"those that do not slide, the largest of them sliding_window={self.sliding_window}"
            )
        return self

    @model_validator(mode="after")
    def _intermediate_sizes_fit(self) -> DecoderConfig:
        sizes = self.intermediate_sizes
        if sizes is None:
            return self
        if len(sizes) != self.num_hidden_layers or min(sizes) < 1 or max(sizes) != self.intermediate_size:
            raise ValueError(
                f"intermediate_sizes={list(sizes)}: one positive width for each of the {self.num_hidden_layers} layers,"
                f" the largest of them intermediate_size={self.intermediate_size}"
            )
        if self.moe is not None or self.shared_layers > 1:
            raise ValueError(
                "intermediate_sizes are for layers of their own without experts: leave out moe and shared_layers"
            )
        return self

    @model_validator(mode="after")
    def _hadamard_fits(self) -> DecoderConfig:
        block = self.table_hadamard
        if block and (block & (block - 1) or not 2 <= block <= 256 or self.hidden_size % block):
            size = self.hidden_size
            raise ValueError(f"table_hadamard={block}: a power of two from 2 to 256 is needed that divides {size}")
        block = self.mlp_hadamard
        if not block:
            return self
        if self.model_type != "penjing" or self.moe is not None:
            raise ValueError("mlp_hadamard is of the model_type 'penjing', without experts")
        for size in self.intermediate_sizes or (self.intermediate_size,):
            if block & (block - 1) or not 2 <= block <= 256 or size % block:
                raise ValueError(f"mlp_hadamard={block}: a power of two from 2 to 256 is needed that divides {size}")
        return self

    @model_validator(mode="after")
    def _departures_fit(self) -> DecoderConfig:
        check_departures(self)
        return self

    def departures(self) -> list[str]:
        """See `departures_of`."""
        return departures_of(self)

    def ffn_size(self, layer: int) -> int:
        """Inner width of the MLP of `layer`."""
        return self.intermediate_size if self.intermediate_sizes is None else self.intermediate_sizes[layer]

    def layer_type(self, layer: int) -> LayerType:
        """Which tokens a query of `layer` may see."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "full_attention" if self.sliding_window is None else "sliding_attention"

    @property
    def gate_size(self) -> int:
        """Gates of a token's attention in a layer, 0 where there are none."""
        each = {None: 0, "head": 1, "channel": self.head_dim}[self.attention_gate]
        return each * self.num_attention_heads

    @property
    def rotates_values(self) -> bool:
        """Whether a rotation of value heads passes to what reads the attention: gates and norms of channels stop it."""
        return self.attention_gate != "channel" and not self.value_norm

    def is_conv(self, layer: int) -> bool:
        """Whether `layer` has a short convolution in place of attention."""
        return self.layer_type(layer) == "short_conv"

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, whose keys and values a cache keeps; not those that read others' keys."""
        own = range(self.num_hidden_layers - self.shared_keys)
        return tuple(layer for layer in own if not self.is_conv(layer))

    def lends_keys(self, layer: int) -> bool:
        """Whether layers behind `layer` read its keys and values, too."""
        borrowing = range(self.num_hidden_layers - self.shared_keys, self.num_hidden_layers)
        return any(self.keys_of(each) == layer for each in borrowing)

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads."""
        own = self.num_hidden_layers - self.shared_keys
        if layer < own:
            return layer
        return next(each for each in reversed(range(own)) if self.layer_type(each) == self.layer_type(layer))

    @model_validator(mode="after")
    def _variants_fit(self) -> DecoderConfig:
        latent, moe = self.latent_attention, self.moe
        if latent is not None:
            whole = latent.qk_nope_head_dim + latent.qk_rope_head_dim
            if self.head_dim != whole or self.num_key_value_heads != self.num_attention_heads:
                raise ValueError(
                    f"latent_attention needs head_dim = qk_nope_head_dim + qk_rope_head_dim = {whole} and "
                    f"num_key_value_heads = num_attention_heads (got {self.head_dim} and {self.num_key_value_heads})"
                )
            if latent.qk_rope_head_dim % 2 or latent.v_head_dim > whole:
                raise ValueError(
                    f"qk_rope_head_dim={latent.qk_rope_head_dim} must be even and v_head_dim={latent.v_head_dim} at "
                    f"most {whole}"
                )
            if self.attention_bias or self.attention_output_bias or self.qk_norm:
                raise ValueError("latent_attention has no attention_bias, attention_output_bias or qk_norm")
            if self.sliding_window is not None or self.layer_types is not None:
                raise ValueError("latent_attention is full attention: leave out sliding_window and layer_types")
        if moe is not None and self.mlp_bias:
            raise ValueError("moe has no mlp_bias")
        if moe is not None and any(layer not in range(self.num_hidden_layers) for layer in moe.mlp_only_layers):
            raise ValueError(f"moe.mlp_only_layers={moe.mlp_only_layers} names layers that do not exist")
        if self.shared_layers > self.num_hidden_layers:
            raise ValueError(f"shared_layers={self.shared_layers} is above num_hidden_layers={self.num_hidden_layers}")
        if len({self.is_moe(layer) for layer in range(self.shared_layers)}) > 1:
            raise ValueError(f"the first shared_layers={self.shared_layers} must be all in mlp_only_layers, or none")
        return self

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has experts in place of an MLP."""
        return self.moe is not None and layer not in self.moe.mlp_only_layers

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.qk_rope_head_dim

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of `layer` in tokens, or None where there is none."""
        if self.layer_type(layer) != "sliding_attention":
            return None
        return self.sliding_window if self.sliding_windows is None else self.sliding_windows[layer]
