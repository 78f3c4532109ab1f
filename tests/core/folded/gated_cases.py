"""Families with gates of attention, as `test_families.CASES` has them: type, settings, and what the folder becomes."""

from __future__ import annotations

from typing import Any

_AFMOE: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "mup_enabled": True,
}
_LAGUNA: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 64.0,
    "beta_slow": 1.0,
    "partial_rotary_factor": 0.5,
}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
GATED_EXPERT_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "afmoe": ("afmoe", _AFMOE | {"route_scale": 2.448, "num_shared_experts": 1}, "penjing"),
    "afmoe_tied": (
        "afmoe",
        _AFMOE
        | {"global_attn_every_n_layers": 2, "num_dense_layers": 0, "tie_word_embeddings": True, "attention_bias": True}
        | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        "penjing",
    ),
    "afmoe_plain": ("afmoe", _AFMOE | {"layer_types": ["full_attention"] * 4, "mup_enabled": False}, "penjing"),
    "laguna": (
        "laguna",
        _LAGUNA
        | {"num_attention_heads_per_layer": [2, 6, 6, 4], "moe_routed_scaling_factor": 2.5}
        | {"rope_parameters": {"full_attention": _YARN, "sliding_attention": _LOCAL}},
        "penjing",
    ),
    "laguna_plain": (
        "laguna",
        _LAGUNA
        | {"layer_types": None, "gating": "per-element", "attention_bias": True, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
        "penjing",
    ),
    "laguna_sliding": ("laguna", _LAGUNA | {"layer_types": ["sliding_attention"] * 4, "gating": "per-head"}, "penjing"),
}
