"""Families with experts: OLMoE, and GLM 4.5 and later, whose experts are chosen as DeepSeek's."""

from __future__ import annotations

from penjing.core.folded.centred import refuse
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of, partial_of
from penjing.core.models.hf_variants import moe_from_hf


def _olmoe(values: Values, source: str) -> Fold:
    refuse(values, source, "clip_qkv")
    count_of(values, "num_hidden_layers", source)
    moe = moe_from_hf(values | {"moe_intermediate_size": values.get("intermediate_size")}, "qwen3_moe", source)
    return Fold(config_of(values, source, qk_norm=True, qk_norm_over="all", moe=moe))


def _glm4_moe(values: Values, source: str) -> Fold:
    count_of(values, "num_hidden_layers", source)
    moe = moe_from_hf(values, "dots1", source)
    changes: Values = {"attention_output_bias": False, "qk_norm": flag_of(values, "use_qk_norm", source), "moe": moe}
    config, rotary = partial_of(values, source, **changes)
    return Fold(config, rotary=rotary, more_layers=True)


# What transformers assumes when a config.json leaves the field out.
EXPERTS: dict[str, Family] = {
    "olmoe": Family(
        _olmoe,
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": Family(
        _glm4_moe,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
        },
    ),
}
