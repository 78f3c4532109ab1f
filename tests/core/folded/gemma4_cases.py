"""Gemma 4 and MiMo-V2-Flash, whose layers have heads of their own, as `test_families.CASES` has families."""

from __future__ import annotations

from typing import Any

from tests.core.folded.seeing_cases import EYES, SIZES

_DENSE: dict[str, Any] = {
    "head_dim": 12,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 1.5,
}
_UNIFIED = {name: each for name, each in _DENSE.items() if name != "hidden_size_per_layer_input"}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e5, "factor": 4.0},
}
_MIXED = _DENSE | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "head_dim": 12,
    "global_head_dim": 24,
}


_VISION = EYES | {"position_embedding_size": 4, "num_key_value_heads": 2, "patch_size": 2}
# Layers take something of each token, and the last ones read the keys of others.
_SMALL = _DENSE | {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}
_MIMO: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "v_head_dim": 10,
    "sliding_window": 9,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5},
    },
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
}
GEMMA4_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma4": ("gemma4_text", _DENSE, "penjing"),
    "gemma4_scaled": (
        "gemma4_text",
        _DENSE
        | {"attention_bias": True, "tie_word_embeddings": False, "rope_parameters": _ROPES, "head_dim": 8}
        | {"global_head_dim": 20, "final_logit_softcapping": None},
        "penjing",
    ),
    "gemma4_alike": (
        "gemma4_text",
        _DENSE | {"global_head_dim": 12, "attention_k_eq_v": False, "layer_types": ["full_attention"] * 4},
        "penjing",
    ),
    "gemma4_unified": (
        "gemma4_unified_text",
        _UNIFIED | {"global_head_dim": 16, "attention_k_eq_v": False, "layer_types": None},
        "penjing",
    ),
    "gemma4_experts": ("gemma4_text", _MIXED, "penjing"),
    "gemma4_seeing": (
        "gemma4",
        {"text_config": SIZES | _DENSE, "vision_config": _VISION, "audio_config": None},
        "penjing",
    ),
    "gemma4_unified_seeing": (
        "gemma4_unified",
        {"text_config": SIZES | _UNIFIED, "vision_config": {"mm_posemb_size": 4}, "audio_config": None},
        "penjing",
    ),
    "gemma4_small": ("gemma4_text", _SMALL, "penjing"),
    "gemma4_small_seeing": (
        "gemma4",
        {"text_config": SIZES | _SMALL, "vision_config": _VISION, "audio_config": None},
        "penjing",
    ),
    "mimo_v2_flash": ("mimo_v2_flash", _MIMO, "penjing"),
    "mimo_v2_flash_plain": (
        "mimo_v2_flash",
        _MIMO
        | {"attention_value_scale": None, "v_head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "sparse", "dense", "sparse"], "routed_scaling_factor": 2.5},
        "penjing",
    ),
}
