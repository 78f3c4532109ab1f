"""One value of a folded family's config.json is something else: it is read, or an error says what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from penjing.core.errors import PenjingError
from penjing.core.folded.families import fold_from_hf
from penjing.core.models.hf_config import FOLDED
from tests.core.folded.test_families import SMALL
from tests.core.imports.test_damaged_folder import ODD

FIELDS = (
    *SMALL, "architectures", "hidden_act", "hidden_activation", "head_dim", "rms_norm_eps", "tie_word_embeddings",
    "attention_bias", "attention_out_bias", "use_bias", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_local_base_freq", "partial_rotary_factor", "layer_types", "sliding_window", "sliding_window_pattern",
    "use_sliding_window", "no_rope_layers", "no_rope_layer_interval", "query_pre_attn_scalar", "embedding_multiplier",
    "logits_scaling", "attention_multiplier", "residual_multiplier", "final_logit_softcapping",
    "attn_logit_softcapping", "layer_norm_eps", "norm_epsilon", "norm_eps", "rotary_pct", "rotary_emb_base",
    "use_parallel_residual", "use_qkv_bias", "qk_layernorm", "use_qk_norm", "logit_scale", "clip_qkv", "mlp_bias",
    "shared_intermediate_size", "num_local_experts", "position_embedding_type", "use_post_norm", "qkv_bias", "bias",
    "q_lora_rank", "kv_lora_rank", "scale_emb", "scale_depth", "dim_model_base",
    "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "num_layers", "num_heads", "attention_types",
    "window_size", "num_experts_per_tok", "num_experts", "n_routed_experts", "use_qk_norm", "first_k_dense_replace",
    "n_shared_experts", "moe_intermediate_size", "routed_scaling_factor", "norm_topk_prob", "n_group", "swiglu_limit",
    "swiglu_alpha", "layer_rope_theta", "ffn_dim", "word_embed_proj_dim", "rotary_dim", "multi_query", "enable_bias",
    "activation_function", "layer_norm_epsilon", "scale_attn_weights", "do_layer_norm_before",
    "qk_rope_head_dim", "original_max_position_embeddings", "mlp_layer_types", "num_shared_experts", "moe_topk",
    "num_shared_expert", "moe_num_experts", "moe_k", "moe_num_shared_experts", "moe_layer_start_index", "topk_group",
    "moe_layer_end_index", "moe_layer_interval", "moe_norm_min", "router_scaling_factor", "expert_selection_fn",
    "shared_expert_combination_strategy", "prefix_dense_sliding_window_pattern", "prefix_dense_intermediate_size",
    "router_jitter_noise", "lm_head_bias", "alibi", "num_ln_in_parallel_attn", "num_kv_heads", "ffn_hidden_size",
    "new_decoder_architecture", "parallel_attn", "activation", "num_dense_layers", "route_scale", "score_func",
    "global_attn_every_n_layers", "mup_enabled", "route_norm", "num_expert_groups", "gating", "conv_L_cache",
    "num_attention_heads_per_layer", "moe_routed_scaling_factor", "moe_router_logit_softcapping", "conv_bias",
    "moe_apply_router_weight_on_input", "shared_expert_intermediate_size", "use_sandwich_norm", "use_attention_gate",
    "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config", "enable_moe_block",
    "top_k_experts", "hidden_size_per_layer_input", "num_kv_shared_layers", "text_config", "vocab_size_per_layer_input",
    "v_head_dim", "attention_value_scale", "sliding_window_size",
)  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"},
    "gpt_neo": {
        "num_layers": 4,
        "num_heads": 4,
        "intermediate_size": 40,
        "attention_types": [[["global", "local"], 2]],
    },
    "opt": {"ffn_dim": 40},
    "gptj": {"rotary_dim": 8},
    "mimo_v2_flash": {"head_dim": 24, "v_head_dim": 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gemma4": {"text_config": {"hidden_size_per_layer_input": 0}},
}
SECTIONS = ("full_attention", "sliding_attention", "rope_theta", "rope_type", "partial_rotary_factor", "factor")


@pytest.mark.parametrize("kind", sorted(FOLDED))
def test_any_damaged_value_is_read_or_refused(kind: str) -> None:
    whole: dict[str, Any] = SMALL | {"model_type": kind, "head_dim": 16, "architectures": [FOLDED[kind]]}
    whole |= NEEDS.get(kind, {})
    fold_from_hf(whole | {"attention_bias": False}, "config.json")
    names = [name for name in dict.fromkeys(FIELDS) if name in whole or _matters(whole, name)]
    assert len(names) > len(whole) or "text_config" in whole  # the settings of its text part are another kind's
    changes: list[dict[str, Any]] = [{name: odd} for name in names for odd in ODD]
    for section in ("rope_parameters", "rope_scaling"):
        changes += [{section: {name: odd}} for name in SECTIONS for odd in ODD]
        changes += [{section: {"full_attention": {name: odd}}} for name in SECTIONS[2:] for odd in ODD]
        changes += [{section: {"sliding_attention": {name: odd}}} for name in SECTIONS[2:] for odd in ODD]
    found = [outcome for change in changes if (outcome := _traceback(whole | change)) is not None]
    assert not found, f"{len(found)} of {len(changes)} values end in a traceback: {found[:3]}"


def _matters(whole: dict[str, Any], name: str) -> bool:
    """Whether anything comes of a field that the file does not have: most fields are those of other kinds."""
    try:
        without = fold_from_hf(whole, "config.json")
        return any(fold_from_hf(whole | {name: odd}, "config.json") != without for odd in (True, -1, "yes", {"a": 1}))
    except Exception:
        return True


def _traceback(values: dict[str, Any]) -> str | None:
    try:
        fold_from_hf(values, "config.json")
    except PenjingError:
        return None
    except Exception as error:
        return f"{error!r} for {values}"
    return None
