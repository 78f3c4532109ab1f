"""Turn a decoder into a `DecoderStep`, which the C++ extension runs in one call a step."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from penjing.core.models.attention import Attention
from penjing.core.models.decoder import Backbone, Decoder, DecoderLayer
from penjing.core.models.mlp import MLP
from penjing.core.models.norm import RMSNorm
from penjing.core.models.rope import ROTARIES, yarn_magnitudes
from penjing.core.runtime.batch_invariant import BatchInvariantLinear
from penjing.core.runtime.embedding import Int8Embedding
from penjing.core.runtime.quantized import QUANTIZED, Int4Linear, Int8Linear
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.dispatch import cpu_extension
from penjing.kernels.step_layers import AnyLinear, FloatLinear, LayerWeights

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED = (Decoder, Backbone, nn.ModuleList, nn.Embedding, Int8Embedding, DecoderLayer, Attention, MLP, RMSNorm)


def fuse_decoder(model: Decoder) -> DecoderStep | None:
    """Lay out `model` for the C++ extension; None, with the reason in the log, where only the torch path serves.

    Quantized weights are copied into packed panels, float ones are used in place; `model` must not change afterwards.
    """
    reason = why_not_fused(model)
    if reason is not None:
        logging.getLogger("penjing").info("decoder steps run on torch: %s", reason)
        return None
    config, backbone = model.config, model.model
    layers = [_layer_weights(model, index) for index in range(config.num_hidden_layers)]
    embedding = backbone.embed_tokens
    extension = cpu_extension()
    assert extension is not None  # why_not_fused() has looked
    return DecoderStep(
        extension,
        layers,
        embedding.table if isinstance(embedding, Int8Embedding) else embedding.weight,
        backbone.norm.weight,
        _linear(model.lm_head),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        inverse_frequency_F=backbone.inverse_frequency,
        max_positions=config.max_position_embeddings,
        rotary_scale=yarn_magnitudes(config.rope_scaling)[0],
        attention_cap=config.attention_cap,
        logit_cap=config.logit_cap,
    )


def why_not_fused(model: Decoder) -> str | None:
    """Why `fuse_decoder` would give None, or None if it would not."""
    device = model.model.norm.weight.device
    if device.type != "cpu":
        return f"the model is on {device}"
    if cpu_extension() is None:
        return "the C++ extension is not built or switched off"
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module) in (nn.Linear, BatchInvariantLinear):
            if _unusable(module.weight):
                return f"{name}.weight is {module.weight.dtype} with strides {module.weight.stride()}"
        elif name.endswith("_proj") or name == "lm_head":
            if type(module) not in QUANTIZED:
                return f"{name} is a {type(module).__name__}"
        elif type(module) not in SUPPORTED:
            return f"{name or 'the model'} is a {type(module).__name__}"
    embedding = model.model.embed_tokens
    if not isinstance(embedding, Int8Embedding) and _unusable(embedding.weight):
        return f"the embedding is {embedding.weight.dtype} with strides {embedding.weight.stride()}"
    return None


def _unusable(weight: Tensor) -> bool:
    return weight.dtype not in FLOATS or not weight.is_contiguous()


def _layer_weights(model: Decoder, index: int) -> LayerWeights:
    layer = model.model.layers[index]
    assert isinstance(layer, DecoderLayer)
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(attention, Attention)
    assert isinstance(mlp, MLP)
    kinds = model.config.layer_rotary
    return LayerWeights(
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        out=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj) if mlp.gated else None,
        down=_linear(mlp.down_proj),
        input_norm=_norm(layer.input_layernorm),
        post_norm=_norm(layer.post_attention_layernorm),
        out_norm=_norm(layer.attention_output_norm),
        down_norm=_norm(layer.mlp_output_norm),
        whole_norm=attention.whole_norm,
        norm_rotated=attention.norm_rotated,
        activation=mlp.activation,
        parallel=layer.parallel,
        rotary=0 if kinds is None else ROTARIES.index(kinds[index]),
        q_norm=attention.q_norm.weight if attention.qk_norm else None,
        k_norm=attention.k_norm.weight if attention.qk_norm else None,
        window=model.config.layer_window(index),
        hadamard=mlp.hadamard,
    )


def _norm(module: RMSNorm | None) -> Tensor | None:
    return None if module is None else module.weight


def _linear(module: nn.Module) -> AnyLinear:
    if isinstance(module, (Int8Linear, Int4Linear)):
        return module.packed
    assert isinstance(module, nn.Linear)
    return FloatLinear(module.weight, module.bias)
