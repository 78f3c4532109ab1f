"""Turn a decoder, or a layer of one, into a `DecoderStep`, which the C++ extension runs in one call a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penjing.core.layers.short_conv import ShortConv, Taps
from penjing.core.models.attention import Attention
from penjing.core.models.config import DecoderConfig
from penjing.core.models.decoder import Backbone, Decoder, DecoderLayer
from penjing.core.models.mlp import MLP, XIELU, TokenInput
from penjing.core.models.moe import Experts, MoE
from penjing.core.models.norm import RMSNorm
from penjing.core.models.rope import ROTARIES, inverse_frequencies, yarn_magnitudes
from penjing.core.runtime.batch_invariant import BatchInvariantLinear
from penjing.core.runtime.embedding import Int8Embedding
from penjing.core.runtime.quantized import QUANTIZED, Int4Linear, Int8Linear
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.step_layers import AnyLinear, ExpertLayers, FloatLinear, Int8Table, LayerWeights, stored_unlike

PAGE = 16  # tokens of a page of keys and values, as the engine's are by default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TABLES = (nn.Embedding, Int8Embedding)
SUPPORTED = (
    *(Decoder, Backbone, nn.ModuleList, *TABLES, DecoderLayer, Attention, MLP, XIELU, RMSNorm),
    *(MoE, Experts, ShortConv, Taps, TokenInput),
)


def fuse_decoder(model: Decoder) -> DecoderStep | None:
    """Lay out `model` for the C++ extension; None, with the reason in the log, where only the torch path serves.

    Quantized weights are copied into packed panels, float ones are used in place; `model` must not change afterwards.
    """
    reason = why_not_fused(model)
    if reason is not None:
        logging.getLogger("penjing").info("decoder steps run on torch: %s", reason)
        return None
    config, backbone = model.config, model.model
    layers = [_layer_weights(config, index, layer) for index, layer in enumerate(backbone.layers)]
    embedding = backbone.embed_tokens
    table = embedding.table if isinstance(embedding, Int8Embedding) else embedding.weight
    positions = backbone.embed_positions.weight if config.learned_positions else None
    head, block = _linear(model.lm_head), config.table_hadamard
    inputs = backbone.embed_inputs.weight if config.token_inputs else None
    return _step(
        config, layers, table, backbone.norm.weight, head, backbone.inverse_frequency, positions, block, inputs
    )


def fuse_layer(config: DecoderConfig, index: int, layer: DecoderLayer) -> Callable[[Tensor], Tensor] | None:
    """Lay out one layer as `fuse_decoder` does all of them; None where only the torch path serves, for experts, of
    which a rounding chooses others, and for layers that read more than what enters them.

    Returns:
        What W sequences of T tokens leave the layer with, given what they enter it with: (W, T, E) float32 both.
    """
    alone = config.keys_of(index) == index and layer.token is None and not isinstance(layer.mlp, MoE)
    if cpu_extension() is None or not alone or _unsupported(layer) is not None:
        return None
    # Tokens beyond the vocabulary enter as they are given; the head's one logit is not looked at.
    one_1E = torch.zeros(1, config.hidden_size)
    weights = _layer_weights(config, index, layer)
    step = _step(config, [weights], one_1E, None, FloatLinear(one_1E), inverse_frequencies(config))
    step.keep_hidden()
    conv = layer.is_conv

    def run(hidden_WTE: Tensor) -> Tensor:
        (count, length, _), pages = hidden_WTE.shape, -(-hidden_WTE.shape[1] // PAGE)
        rows_R = torch.arange(count * length, dtype=torch.int32)
        positions_WT = torch.arange(length).expand(count, length)
        first_page_W1 = torch.arange(count)[:, None] * pages
        step.step(
            1 + rows_R,
            positions_WT.flatten().int(),
            (first_page_W1 * PAGE + positions_WT).flatten(),
            torch.arange(count + 1, dtype=torch.int32) * length,
            torch.full((count,), length, dtype=torch.int32),
            (first_page_W1 + torch.arange(pages)).int(),
            rows_R,
            torch.zeros(int(not conv), 2, count * pages, config.num_key_value_heads, PAGE, config.head_dim),
            seen_XE=hidden_WTE.flatten(0, 1).contiguous(),
            row_pool=torch.zeros(1, count * pages, PAGE, config.hidden_size) if conv else None,
        )
        assert step.hidden_RE is not None
        return step.hidden_RE[: count * length].view(hidden_WTE.shape).clone()

    return run


def _step(
    config: DecoderConfig,
    layers: list[LayerWeights],
    embedding: Tensor | Int8Table,
    final_norm: Tensor | None,
    head: AnyLinear,
    inverse_frequency: Tensor,
    positions: Tensor | None = None,
    table_hadamard: int = 0,
    token_table: Tensor | None = None,
) -> DecoderStep:
    extension = cpu_extension()
    assert extension is not None  # the callers have looked
    return DecoderStep(
        extension,
        layers,
        embedding,
        final_norm,
        head,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        inverse_frequency_F=inverse_frequency,
        max_positions=config.max_position_embeddings,
        positions_PE=positions,
        rotary_scale=yarn_magnitudes(config.rope_scaling)[0],
        attention_cap=config.attention_cap,
        logit_cap=config.logit_cap,
        table_hadamard=table_hadamard,
        token_table=token_table,
    )


def why_not_fused(model: Decoder) -> str | None:
    """Why `fuse_decoder` would give None, or None if it would not."""
    device = model.model.norm.weight.device
    if device.type != "cpu":
        return f"the model is on {device}"
    if cpu_extension() is None:
        return "the C++ extension is not built or switched off"
    reason = _unsupported(model) or unusual_experts(model.config)
    if reason is not None:
        return reason
    for name, module in model.named_modules():
        if isinstance(module, MoE) and stored_unlike(_expert_layers(module)):
            return f"experts of {name} are stored in different forms"
    embedding = model.model.embed_tokens
    if not isinstance(embedding, Int8Embedding) and _unusable(embedding.weight):
        return f"the embedding is {embedding.weight.dtype} with strides {embedding.weight.stride()}"
    if model.config.token_inputs and _unusable(model.model.embed_inputs.weight):
        return f"the table of token_inputs is {model.model.embed_inputs.weight.dtype}"
    return None


def _unsupported(whole: Decoder | DecoderLayer) -> str | None:
    for name, module in whole.named_modules():
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, BatchInvariantLinear):
            if _unusable(module.weight):
                return f"{name}.weight is {module.weight.dtype} with strides {module.weight.stride()}"
        elif name.endswith("_proj") or name == "lm_head":
            if type(module) not in QUANTIZED:
                return f"{name} is a {type(module).__name__}"
        elif type(module) not in SUPPORTED:
            return f"{name or 'the model'} is a {type(module).__name__}"
    return None


def _unusable(weight: Tensor) -> bool:
    return weight.dtype not in FLOATS or not weight.is_contiguous()


def _layer_weights(config: DecoderConfig, index: int, layer: nn.Module) -> LayerWeights:
    assert isinstance(layer, DecoderLayer)
    mixer, mlp, kinds = layer.mixer, layer.mlp, config.layer_rotary
    return LayerWeights(
        **(_convolution(mixer) if isinstance(mixer, ShortConv) else _attention(mixer)),
        **(_experts(mlp) if isinstance(mlp, MoE) else _mlp(mlp)),
        input_norm=_norm(layer.input_layernorm),
        post_norm=_norm(layer.post_attention_layernorm),
        out_norm=_norm(layer.attention_output_norm),
        down_norm=_norm(layer.mlp_output_norm),
        parallel=layer.parallel,
        keys_of=None if config.keys_of(index) == index else config.keys_of(index),
        token=None if layer.token is None else _token(layer.token),
        scale=1.0 if layer.layer_scale is None else float(layer.layer_scale),
        rotary=0 if kinds is None else ROTARIES.index(kinds[index]),
        window=config.layer_window(index),
    )


def _attention(attention: nn.Module) -> dict[str, Any]:
    assert isinstance(attention, Attention)
    return {
        "q": _linear(attention.q_proj),
        "k": _linear(attention.k_proj) if attention.has_keys else None,
        "v": _linear(attention.v_proj) if attention.has_keys else None,
        "out": _linear(attention.o_proj),
        "whole_norm": attention.whole_norm,
        "norm_rotated": attention.norm_rotated,
        "q_norm": attention.q_norm.weight if attention.qk_norm else None,
        "k_norm": attention.k_norm.weight if attention.qk_norm and attention.has_keys else None,
        "v_norm": _norm(attention.v_norm),
        "attended_norm": _norm(attention.attn_sub_norm),
        "sinks": attention.sinks,
        "head_gate": None if attention.g_proj is None else _linear(attention.g_proj),
        "gate_function": attention.gate_function,
    }


def _token(token: TokenInput) -> tuple[AnyLinear, AnyLinear, Tensor]:
    return _linear(token.gate_proj), _linear(token.out_proj), token.norm.weight


def _convolution(conv: ShortConv) -> dict[str, Any]:
    return {
        "q": _linear(conv.in_proj),
        "k": None,
        "v": None,
        "out": _linear(conv.out_proj),
        "taps": conv.taps.weight[:, 0],
        "tap_bias": conv.taps.bias,
    }


def _mlp(mlp: MLP) -> dict[str, Any]:
    return {
        "gate": _linear(mlp.gate_proj),
        "up": _linear(mlp.up_proj) if mlp.gated else None,
        "down": _linear(mlp.down_proj),
        "activation": mlp.activation,
        "curve": mlp.act_fn.curve if mlp.activation == "xielu" else (0.0, 0.0),
        "hadamard": mlp.hadamard,
        "inner_norm": _norm(mlp.ffn_sub_norm),
    }


def _experts(moe: MoE) -> dict[str, Any]:
    return _mlp(moe.experts[0]) | {"experts": _expert_layers(moe)}  # pyright: ignore[reportArgumentType]


def _expert_layers(moe: MoE) -> ExpertLayers:
    config, router = moe.config, _linear(moe.gate)
    assert isinstance(router, FloatLinear)
    if config.shared_expert_gate:
        router = FloatLinear(torch.cat((router.weight_NK.detach(), moe.shared_expert_gate.weight.detach())))
    every = [_mlp(moe.experts[index]) for index in range(config.num_experts)]  # pyright: ignore[reportArgumentType]
    shared = config.shared_expert_intermediate_size > 0
    every += [_mlp(moe.shared_experts)] if shared else []
    gates, ups, downs = ([each[name] for each in every] for name in ("gate", "up", "down"))
    return ExpertLayers(
        router,
        gates,
        ups,
        downs,
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
        config.scoring_func == "sigmoid",
        moe.e_score_correction_bias if config.router_bias else None,
        shared,
        config.shared_expert_gate,
        2 * config.router_jitter_noise if config.scoring_func == "sparsemixer" else None,
        config.router_bias_of == "logits",
        moe.experts_output_norm.weight if config.output_norms else None,
        moe.shared_output_norm.weight if config.output_norms else None,
    )


def unusual_experts(config: DecoderConfig) -> str | None:
    """What a layer's experts have that the C++ step does not know."""
    moe = config.moe
    if moe is None:
        return None
    if 0 < moe.shared_expert_intermediate_size < moe.moe_intermediate_size:
        return "the MLP that all tokens take is narrower than an expert"
    if moe.shared_expert_intermediate_size and moe.activation == "clamped_swiglu":
        return "what all tokens take has an activation of its own"
    if moe.shared_expert_intermediate_size and moe.scoring_func == "sparsemixer":
        return "all tokens take something beside experts of sparsemixer"
    if moe.shared_expert_gate and moe.biases:
        return "the router has biases beside a gate of what all tokens take"
    return "its experts stand in groups" if moe.n_group > 1 else None


def _norm(module: RMSNorm | None) -> Tensor | None:
    return None if module is None else module.weight


def _linear(module: nn.Module) -> AnyLinear:
    if isinstance(module, (Int8Linear, Int4Linear)):
        return module.packed
    assert isinstance(module, nn.Linear)
    return FloatLinear(module.weight, module.bias)
