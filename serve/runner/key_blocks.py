"""The settings of `attention=window+blocks` for a model: checked, counted in blocks, with the summaries' memory."""

from __future__ import annotations

import torch

from penjing.core.errors import ConfigError
from penjing.core.models.config import DecoderConfig
from penjing.core.runtime.fused import unusual_experts
from penjing.kernels.cpu.key_blocks import KeyBlocks, StepBlocks, bytes_of_summaries
from penjing.serve.engine.config import EngineConfig


def key_blocks_of(config: EngineConfig) -> KeyBlocks | None:
    """How rows choose; None: they read everything."""
    if config.attention == "full":
        return None
    size = config.attention_block
    sizes = config.attention_sink, config.attention_window, config.attention_budget
    return KeyBlocks(size, *(keys // size for keys in sizes))


def full_layers_of(config: EngineConfig) -> frozenset[int]:
    """Layers that read all keys."""
    layers = config.attention_full_layers
    return frozenset(range(layers) if isinstance(layers, int) else layers)


def check_key_blocks(config: EngineConfig, model: DecoderConfig) -> None:
    """Raise ConfigError unless `model` can be served with `config.attention`; nothing of its weights is looked at."""
    if config.attention == "full":
        return
    wanted = f"attention={config.attention}"
    if config.device == "cuda":
        raise ConfigError(f"{wanted} is for device=cpu so far; leave attention=full, or take device=cpu")
    if model.latent_attention is not None:
        raise ConfigError(
            f"{wanted} does not fit this model: its keys come from latent attention; leave attention=full"
        )
    if model.shared_keys:
        raise ConfigError(f"{wanted} does not fit this model: layers read others' keys; leave attention=full")
    if (why := unusual_experts(model)) is not None:
        raise ConfigError(f"{wanted} does not fit this model: {why}; leave attention=full")
    kinds = {model.layer_type(layer) for layer in range(model.num_hidden_layers)} - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"{wanted} does not fit this model: it was trained with layers of {', '.join(sorted(kinds))}; "
            "leave attention=full, which serves these layers as they are"
        )
    context = config.max_model_len or model.max_position_embeddings
    for name in ("attention_window", "attention_budget"):
        if (keys := getattr(config, name)) >= context:
            raise ConfigError(
                f"{name}={keys} holds the whole context of {context} tokens, so that nothing is left to choose; "
                f"lower it, or leave attention=full"
            )
    given, layers = config.attention_full_layers, full_layers_of(config)
    has = f"attention_full_layers={list(given) if isinstance(given, tuple) else given}: the model has"
    if isinstance(given, tuple) and (beyond := [layer for layer in given if layer >= model.num_hidden_layers]):
        raise ConfigError(
            f"{has} {model.num_hidden_layers} layers, the first of them 0, and none with the number {beyond[0]}; "
            "name others"
        )
    if len(layers) >= model.num_hidden_layers:
        raise ConfigError(
            f"{has} {model.num_hidden_layers} layers, so that none would choose; name fewer, or leave attention=full"
        )


def bytes_per_page(config: EngineConfig, model: DecoderConfig) -> int:
    """Of the summaries in a page of the KV cache, all layers."""
    blocks = key_blocks_of(config)
    if blocks is None:
        return 0
    layers = model.num_hidden_layers - len(full_layers_of(config))
    return layers * bytes_of_summaries(blocks, model.num_key_value_heads, config.block_size, model.head_dim)


def allocate_summaries(config: EngineConfig, model: DecoderConfig) -> StepBlocks | None:
    """Zeros, for the pages of a resolved `config`; None where rows read everything."""
    blocks = key_blocks_of(config)
    if blocks is None:
        return None
    assert config.num_blocks is not None
    layers = model.num_hidden_layers - len(full_layers_of(config))
    shape = (
        layers,
        *blocks.summary_shape(config.num_blocks, model.num_key_value_heads, config.block_size, model.head_dim),
    )
    return StepBlocks(blocks, full_layers_of(config), torch.zeros(shape, dtype=torch.int8), torch.zeros(shape[:-1]))
