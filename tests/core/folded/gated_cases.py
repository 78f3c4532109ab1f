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
}
