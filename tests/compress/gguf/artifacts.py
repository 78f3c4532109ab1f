"""Small decoders with INT8 weights as an artifact stores them, without the run that makes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penjing.compress.decoder.check import linear_modules
from penjing.compress.decoder.weights import quantize_per_channel
from penjing.core.artifact.decoder import quantization_config
from penjing.core.checkpoint.decoder import Checkpoint, open_checkpoint, save_checkpoint
from tests.conftest import random_tensors, tiny_config

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 24.0}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": tuple(1 + step / 8 for step in range(8)),
    "long_factor": tuple(1.5 + step * step for step in range(8)),
    "original_max_position_embeddings": 32,
    "attention_factor": 1.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tie_word_embeddings": False},
    "llama-biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama-yarn": {"rope_scaling": YARN},
    "llama-yarn-factor": {"rope_scaling": YARN | {"attention_factor": 1.0}},
    "llama-longrope": {"rope_scaling": LONGROPE},
    "llama-3": {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "llama-3-other": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 6.0,
            "original_max_position_embeddings": 256,
        }
    },
    "mistral": {"model_type": "mistral"},
    "mistral-window": {"model_type": "mistral", "sliding_window": 64},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen2-linear": {
        "model_type": "qwen2",
        "attention_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen2-yarn": {"model_type": "qwen2", "attention_bias": True, "rope_scaling": YARN},
    "qwen2-window": {
        "model_type": "qwen2",
        "attention_bias": True,
        "sliding_window": 64,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {"model_type": "qwen3", "qk_norm": True, "head_dim": 32},
    "qwen3-untied": {"model_type": "qwen3", "qk_norm": True, "tie_word_embeddings": False},
    "qwen3-128": {"model_type": "qwen3", "qk_norm": True, "head_dim": 128},  # transformers' reader assumes 128
    "mixtral": {"model_type": "mixtral", "moe": MOE},
    "qwen2-moe": {  # of these, transformers' reader assumes the widths
        "model_type": "qwen2_moe",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "moe": {
            **MOE,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 5632,
            "shared_expert_gate": True,
        },
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "qk_norm": True,
        "head_dim": 128,
        "moe": {**MOE, "moe_intermediate_size": 768},
    },
    "pruned": {"model_type": "penjing", "intermediate_sizes": (96, 64)},
    "pruned-biases": {
        "model_type": "penjing",
        "intermediate_sizes": (96, 64),
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    },
}


def make_int8(folder: Path, tokenizer_from: Path | None = None, **overrides: Any) -> Checkpoint:
    """A random decoder of these settings, all of its linear layers in INT8 but a tied head."""
    folder.mkdir()
    config = tiny_config(**overrides)
    linears = linear_modules(config)
    if config.tie_word_embeddings:
        linears.remove("lm_head")
    tensors = {}
    for name, weight in random_tensors(config):
        if name.removesuffix(".weight") in linears:
            quantized = quantize_per_channel(weight)
            tensors |= {name: quantized.weight_NK, f"{name}_scale": quantized.scale_N1}
        else:
            tensors[name] = weight
    keep = ["lm_head"] if config.tie_word_embeddings else []
    extra = {"quantization_config": quantization_config(keep)}
    save_checkpoint(folder, config, tensors.items(), tokenizer_from=tokenizer_from, extra_config=extra)
    return open_checkpoint(folder)
