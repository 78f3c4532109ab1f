"""A decoder as numbers: parameters, floating-point operations and activations of each layer, without building it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.train.numerics.recompute import Recompute


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        dense: parameters that every token passes: attention or a convolution, norms, MLP or shared experts and router.
        experts: parameters of all routed experts.
        active: of `experts`, those that one token passes.
        attend: FLOPs of a token with one key: scores and their sum over values.
        window: keys that a token sees at most; None: all before it.
        kept: elements that one token's forward pass keeps for the backward pass, by recomputation; block inputs are the
            "full" ones. The first number is split by tensor parallelism, the second only with `sequence`.
        routed: experts a token goes to; 0 without experts.
        looked_up: parameters of which a token has a row.
    """

    dense: int
    experts: int
    active: int
    attend: int
    window: int | None
    kept: dict[Recompute, tuple[int, int]]
    key_values: int  # elements of a token's keys and values, or of what a convolution reads of it
    routed: int = 0
    looked_up: int = 0

    @property
    def parameters(self) -> int:
        """All of the layer."""
        return self.dense + self.experts + self.looked_up

    def forward_flops(self, length: int, causal: bool = False) -> float:
        """FLOPs of one token's forward pass in sequences of `length` tokens; `causal` counts only the half of the
        square that is computed, else the whole as in MFU figures (appendix B of PaLM, https://arxiv.org/abs/2204.02311)."""
        keys = length / 2 if causal else length
        keys = keys if self.window is None else min(keys, self.window)
        return 2 * (self.dense + self.active) + self.attend * keys


@dataclass(frozen=True, eq=False)  # looked up by identity: plans ask thousands of times
class ModelShape:
    """A decoder: its layers, and the table at either end."""

    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerShape, ...]

    @property
    def table(self) -> int:
        """Parameters of the embedding, and as many of the head."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """All of them."""
        return sum(layer.parameters for layer in self.layers) + self.table * (1 if self.tied else 2) + self.hidden

    def model_flops(self, length: int) -> float:
        """FLOPs of training on one token in sequences of `length`: three forward passes, as MFU counts them."""
        return 3 * (sum(layer.forward_flops(length) for layer in self.layers) + 2 * self.table)

    def costs(self, length: int) -> tuple[float, ...]:
        """Forward FLOPs a token of every layer, the head's added to the last and the embedding's lookup for nothing."""
        costs = [layer.forward_flops(length, causal=True) for layer in self.layers]
        return (*costs[:-1], costs[-1] + 2 * self.table)


def decoder_shape(model: object) -> ModelShape:
    """The shape of a recipe's model.

    Raises:
        ConfigError: it is no decoder.
    """
    if not isinstance(model, DecoderConfig):
        raise ConfigError("planning is for decoders; give a recipe with model.architecture = 'decoder'")
    return ModelShape(
        hidden=model.hidden_size,
        vocabulary=model.vocab_size,
        tied=model.tie_word_embeddings,
        layers=tuple(_layer(model, index) for index in range(model.num_hidden_layers)),
    )


def _layer(model: DecoderConfig, index: int) -> LayerShape:
    hidden, moe = model.hidden_size, model.moe if model.is_moe(index) else None
    conv = model.is_conv(index)
    attention, queries, key_values, values = _convolution(model) if conv else _attention(model)
    if model.keys_of(index) != index:
        attention -= (hidden + model.attention_bias) * key_values
        if model.qk_norm:
            attention -= key_values // 2 if model.qk_norm_over == "all" else model.head_dim
        attention -= model.head_dim if model.value_norm else 0
        key_values = 0
    dense = attention + (4 if model.norms == "around" else 2) * hidden
    dense += (1 if model.layer_scales else 0) + (2 * hidden * model.token_inputs + hidden if model.token_inputs else 0)
    if model.inner_norms:
        dense += (0 if conv else model.num_attention_heads * model.head_dim) + model.ffn_size(index)
    experts = active = 0
    if moe is None:
        inner = model.ffn_size(index)
        readers = 2 if model.mlp_gated else 1
        dense += (readers + 1) * hidden * inner + (readers * inner + hidden if model.mlp_bias else 0)
    else:
        shared = moe.shared_expert_intermediate_size
        dense += hidden * moe.num_experts + 3 * hidden * shared + (hidden if moe.shared_expert_gate else 0)
        dense += moe.num_experts if moe.router_bias else 0
        dense += 2 * hidden if moe.output_norms else 0
        experts = moe.num_experts * 3 * hidden * moe.moe_intermediate_size
        active = moe.num_experts_per_tok * 3 * hidden * moe.moe_intermediate_size
        inner = shared + moe.num_experts_per_tok * moe.moe_intermediate_size
    # Elements kept: inputs of norms and of matrix products, q, k, v and the output of attention, its gates and what
    # they leave, the MLP's inner ones.
    gates = 0 if conv or not model.gate_size else model.gate_size + values
    products = queries + key_values + values + gates + 2 * inner
    copies = 4 if moe is None else 4 + 2 * moe.num_experts_per_tok  # a routed token is copied to each of its experts
    return LayerShape(
        dense=dense,
        experts=experts,
        active=active,
        attend=0 if conv else 2 * (queries + values),
        window=model.layer_window(index),
        kept={
            "none": (products + inner, copies * hidden),
            "selective": (products, 3 * hidden),
            "full": (0, hidden),
        },
        key_values=key_values,
        routed=moe.num_experts_per_tok if moe else 0,
        looked_up=model.vocab_size * model.token_inputs,
    )


def _convolution(model: DecoderConfig) -> tuple[int, int, int, int]:
    """The same four of a short convolution: what its projection gives, what it reads of a token, and its sum and that
    behind its gate."""
    hidden = model.hidden_size
    parameters = hidden * (4 * hidden + model.conv_taps) + (5 * hidden if model.conv_bias else 0)
    return parameters, 3 * hidden, hidden, 2 * hidden


def _attention(model: DecoderConfig) -> tuple[int, int, int, int]:
    """(parameters, elements of a token's queries, of its keys and values, of its attended values)."""
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.latent_attention
    if latent is None:
        queries, key_values = heads * model.head_dim, 2 * model.num_key_value_heads * model.head_dim
        parameters = hidden * (2 * queries + key_values + model.gate_size)
        parameters += queries + key_values if model.attention_bias else 0
        parameters += hidden if model.attention_output_bias else 0
        parameters += model.head_dim if model.value_norm else 0
        if model.qk_norm:
            parameters += queries + key_values // 2 if model.qk_norm_over == "all" else 2 * model.head_dim
        return parameters, queries, key_values, queries
    queries, values = heads * model.head_dim, heads * latent.v_head_dim
    rank = latent.q_lora_rank
    parameters = hidden * queries if rank is None else hidden * rank + rank + rank * queries
    parameters += hidden * (latent.kv_lora_rank + latent.qk_rope_head_dim) + latent.kv_lora_rank
    parameters += latent.kv_lora_rank * heads * (latent.qk_nope_head_dim + latent.v_head_dim) + values * hidden
    return parameters, queries, queries + values, values
