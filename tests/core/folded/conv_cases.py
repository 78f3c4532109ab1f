"""Families with short convolutions, as `test_families.CASES` has them: type, settings, and what the folder becomes."""

from __future__ import annotations

from typing import Any

from penjing.core.folded.lfm2 import LFM3_NAMES, NAMES

_LFM2: dict[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
_MOE: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LFM3: dict[str, Any] = {
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "head_dim": 16,
    "sliding_window": 9,
    "conv_L_cache": 7,
}
_LOCAL = {"rope_type": "default", "rope_theta": 1e4}
_MAIN = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.75}
CONV_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "lfm2": ("lfm2", _LFM2 | {"block_auto_adjust_ff_dim": True, "block_multiple_of": 20}, "penjing"),
    "lfm2_bias": (
        "lfm2",
        _LFM2
        | {"layer_types": None, "full_attn_idxs": [0, 3]}
        | {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
        "penjing",
    ),
    "lfm2_attention": ("lfm2", _LFM2 | {"layer_types": None, "full_attn_idxs": None}, "qwen3"),
    "lfm3": ("lfm3", _LFM3, "penjing"),
    "lfm3_scaled": (
        "lfm3",
        _LFM3
        | {"use_attention_gate": False, "tie_word_embeddings": False, "attention_bias": True, "conv_bias": True}
        | {"rope_parameters": {"sliding_attention": _LOCAL, "full_attention": _MAIN | {"factor": 2.0}}},
        "penjing",
    ),
    "lfm3_plain": (
        "lfm3",
        _LFM3
        | {"layer_types": ["conv", "full_attention"] * 2, "use_sandwich_norm": False}
        | {"rope_parameters": {"full_attention": _MAIN | {"partial_rotary_factor": 1.0}}},
        "penjing",
    ),
}
CONV_EXPERT_CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "lfm2_moe": ("lfm2_moe", _MOE, "penjing"),
    "lfm2_moe_plain": (
        "lfm2_moe",
        _MOE
        | {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0}
        | {"routed_scaling_factor": 1.5, "tie_word_embeddings": False, "conv_bias": True},
        "penjing",
    ),
}


def _named(names: dict[str, str]) -> dict[str, str]:
    return {f".{ours}.": f".{theirs}." for ours, theirs in names.items()} | {"model.norm.": "model.embedding_norm."}


CONV_NAMES, CONV_NAMES_3 = _named(NAMES), _named(LFM3_NAMES)
"""Part of a name of ours → of theirs, of LFM2 and of LFM3."""
