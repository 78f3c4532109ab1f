"""Families with experts: name → (type of folder, settings of a small network, what it becomes)."""

from __future__ import annotations

from typing import Any

from tests.core.folded.conv_cases import CONV_EXPERT_CASES
from tests.core.folded.gated_cases import GATED_EXPERT_CASES

Case = tuple[str, dict[str, Any], str]
GRANITE: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
}
HYBRID: dict[str, Any] = GRANITE | {
    "layer_types": ["full_attention"] * 4,
    "shared_intermediate_size": 56,
    "mamba_n_heads": 4,
}
DEEPSEEK: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
HALF = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
PHI_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 4.0, 8.0, 16.0, 30.0],
    "short_mscale": 1.25,
    "long_mscale": 1.5,
    "original_max_position_embeddings": 64,
}
ERNIE: dict[str, Any] = {"head_dim": 12, "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 2}
FLINT: dict[str, Any] = {
    "head_dim": 12,
    "sliding_window": 9,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}
COHERE: dict[str, Any] = {"head_dim": 12, "logit_scale": 0.25, "sliding_window": 9, "num_experts": 6}
SPARSE = ["dense", "sparse", "sparse", "sparse"]
EXPERT_CASES: dict[str, Case] = (
    {
        "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}, "penjing"),
        "glm4_moe": (
            "glm4_moe",
            DEEPSEEK | {"head_dim": 16, "rope_parameters": HALF, "use_qk_norm": True, "attention_bias": True},
            "penjing",
        ),
        "glm4_moe_yarn": (
            "glm4_moe",
            DEEPSEEK | {"head_dim": 16, "use_qk_norm": True, "rope_parameters": HALF | YARN},
            "penjing",
        ),
        "granitemoe": ("granitemoe", GRANITE | {"tie_word_embeddings": True}, "mixtral"),
        "granitemoe_bias": ("granitemoe", GRANITE | {"attention_bias": True, "num_experts_per_tok": 5}, "penjing"),
        "granitemoeshared": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 56}, "penjing"),
        "granitemoeshared_none": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 0}, "mixtral"),
        "granitemoeshared_alike": ("granitemoeshared", GRANITE | {"shared_intermediate_size": 40}, "penjing"),
        "granite_4_experts": ("granitemoehybrid", HYBRID | {"position_embedding_type": "rope"}, "penjing"),
        "granite_4_experts_nope": ("granitemoehybrid", HYBRID | {"tie_word_embeddings": True}, "penjing"),
        "granitemoe_swa": (
            "granitemoe_swa",
            GRANITE | {"sliding_window": 9, "shared_intermediate_size": 40, "layer_rope_theta": [0, 1e4, 5e5, 1e4]},
            "penjing",
        ),
        "ernie4_5_moe": ("ernie4_5_moe", ERNIE, "penjing"),
        "ernie4_5_moe_plain": (
            "ernie4_5_moe",
            ERNIE
            | {
                "moe_num_shared_experts": 0,
                "moe_layer_interval": 2,
                "moe_layer_start_index": 0,
                "moe_layer_end_index": 2,
            }
            | {"tie_word_embeddings": False},
            "penjing",
        ),
        "ernie4_5_moe_one": ("ernie4_5_moe", ERNIE | {"moe_num_shared_experts": 1}, "penjing"),
        "hunyuan_moe": (
            "hunyuan_v1_moe",
            {
                "head_dim": 12,
                "num_experts": 6,
                "moe_topk": 2,
                "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
            },
            "penjing",
        ),
        "hunyuan_moe_lists": (
            "hunyuan_v1_moe",
            {
                "head_dim": 16,
                "num_experts": 5,
                "moe_topk": [3] * 4,
                "attention_bias": True,
                "tie_word_embeddings": True,
            },
            "penjing",
        ),
        "minimax_m2": (
            "minimax_m2",
            {"head_dim": 16, "rope_parameters": HALF, "num_local_experts": 6, "num_experts_per_tok": 2},
            "penjing",
        ),
        "minimax_m2_whole": (
            "minimax_m2",
            {"head_dim": 12, "num_local_experts": 9, "tie_word_embeddings": True},
            "penjing",
        ),
        "flex_olmo": ("flex_olmo", {"num_experts": 6, "num_experts_per_tok": 3}, "penjing"),
        "flex_olmo_normed": (
            "flex_olmo",
            {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "attention_bias": True},
            "penjing",
        ),
        "exaone_moe": (
            "exaone_moe",
            {
                "sliding_window": 9,
                "moe_intermediate_size": 24,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "head_dim": 12,
            },
            "penjing",
        ),
        "exaone_moe_groups": (
            "exaone_moe",
            {
                "sliding_window": 9,
                "layer_types": ["full_attention"] * 4,
                "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
                "moe_intermediate_size": 24,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "num_shared_experts": 2,
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": False,
                "tie_word_embeddings": True,
            },
            "penjing",
        ),
        "solar_open": ("solar_open", DEEPSEEK | {"head_dim": 12}, "penjing"),
        "solar_open_bias": (
            "solar_open",
            DEEPSEEK
            | {"head_dim": 16, "attention_bias": True, "n_shared_experts": 2}
            | {"tie_word_embeddings": True, "norm_topk_prob": False},
            "penjing",
        ),
        "hy_v3": (
            "hy_v3",
            {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "dots1",
        ),
        "hy_v3_lists": (
            "hy_v3",
            {
                "head_dim": 12,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "num_shared_experts": 2,
                "attention_bias": True,
                "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            },
            "penjing",
        ),
        "glm4_moe_lite": ("glm4_moe_lite", DEEPSEEK | LATENT | {"n_group": 2, "topk_group": 1}, "deepseek_v3"),
        "glm4_moe_lite_lists": (
            "glm4_moe_lite",
            DEEPSEEK
            | LATENT
            | {"mlp_layer_types": ["sparse", "dense"] * 2, "q_lora_rank": None, "rope_interleave": False},
            "penjing",
        ),
        "mellum": (
            "mellum",
            {
                "head_dim": 12,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": BASES,
                "mlp_layer_types": SPARSE,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
            },
            "penjing",
        ),
        "mellum_full": (
            "mellum",
            {
                "head_dim": 12,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "norm_topk_prob": False,
                "attention_bias": True,
                "rope_parameters": BASES,
            },
            "qwen3_moe",
        ),
        "cohere2_moe": ("cohere2_moe", COHERE, "penjing"),
        "cohere2_moe_sigmoid": (
            "cohere2_moe",
            COHERE
            | {
                "num_shared_experts": 2,
                "expert_selection_fn": "sigmoid",
                "norm_topk_prob": False,
                "mlp_layer_types": SPARSE,
                "prefix_dense_intermediate_size": 56,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
            "penjing",
        ),
        "cohere2_moe_sum": (
            "cohere2_moe",
            COHERE
            | {
                "num_shared_experts": 1,
                "shared_expert_combination_strategy": "sum",
                "expert_selection_fn": "sigmoid",
                "rms_norm_eps": 1e-5,
                "first_k_dense_replace": 2,
                "prefix_dense_sliding_window_pattern": 2,
                "prefix_dense_intermediate_size": 56,
            },
            "penjing",
        ),
        "phimoe": ("phimoe", {"num_local_experts": 6, "router_jitter_noise": 0.2}, "penjing"),
        "phimoe_bias": (
            "phimoe",
            {
                "head_dim": 12,
                "num_local_experts": 5,
                "attention_bias": True,
                "lm_head_bias": True,
                "rope_parameters": PHI_LONGROPE,
                "sliding_window": 21,
            },
            "penjing",
        ),
        "phimoe_tied": (
            "phimoe",
            {"num_local_experts": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
            "penjing",
        ),
        "flint": (
            "flint",
            FLINT | {"layer_types": ["full_attention", "sliding_attention"] * 2, "mlp_only_layers": [1]},
            "penjing",
        ),
        "flint_full": (
            "flint",
            FLINT
            | {
                "layer_types": ["full_attention"] * 4,
                "mlp_only_layers": [],
                "decoder_sparse_step": 2,
                "attention_bias": True,
            }
            | {"tie_word_embeddings": True, "norm_topk_prob": False},
            "penjing",
        ),
        "kolibri1": ("kolibri1", FLINT, "penjing"),
        "kolibri1_mixed": (
            "kolibri1",
            FLINT
            | {"layer_types": ["sliding_attention", "full_attention"] * 2, "n_group": 2, "norm_topk_prob": True}
            | {"tie_word_embeddings": True},
            "penjing",
        ),
    }
    | CONV_EXPERT_CASES
    | GATED_EXPERT_CASES
)
