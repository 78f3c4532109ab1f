"""Mixture of experts and latent attention in Hugging Face `config.json`, whose fields differ from type to type."""

from __future__ import annotations

from typing import Any

from penjing.core.errors import InputError
from penjing.core.layers.settings import LatentAttentionConfig, MoEConfig
from penjing.core.models.config import DecoderConfig

LATENT_TYPES = ("deepseek_v2", "deepseek_v3")
_DEEPSEEK_MOE = ("dots1", *LATENT_TYPES)  # names of the fields are DeepSeek's
MOE_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", *_DEEPSEEK_MOE)
# What transformers assumes when a config.json leaves the field out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "dots1": {},
    "deepseek_v2": {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    "deepseek_v3": {
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
    },
}
_LATENT_DEFAULTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def moe_from_hf(values: dict[str, Any], kind: str, source: str) -> dict[str, Any] | None:
    """The fields of `MoEConfig` in a `config.json` of type `kind`; None for a type without experts.

    Args:
        values: the JSON object; its sizes are checked, and fields that are null are left out.

    Raises:
        InputError: a field is missing or of a kind that penjing does not run.
    """
    if kind not in MOE_TYPES:
        return None
    # transformers 5 writes num_local_experts for every type but reads both
    aliases = {"num_experts": values["num_local_experts"]} if "num_local_experts" in values else {}
    values = _DEFAULTS[kind] | aliases | values
    if kind in _DEEPSEEK_MOE:
        return _deepseek_moe(values, kind, source)
    inner = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size"
    fields: dict[str, Any] = {
        "num_experts": _count(values, "num_local_experts" if kind == "mixtral" else "num_experts", source),
        "num_experts_per_tok": _count(values, "num_experts_per_tok", source),
        "moe_intermediate_size": _count(values, inner, source),
        "norm_topk_prob": kind == "mixtral" or values.get("norm_topk_prob", False),
    }
    if kind == "qwen2_moe":
        size = _count(values, "shared_expert_intermediate_size", source)
        fields |= {"shared_expert_intermediate_size": size, "shared_expert_gate": True}
    if kind != "mixtral":
        step = _count(
            values | {"decoder_sparse_step": values.get("decoder_sparse_step", 1)}, "decoder_sparse_step", source
        )
        dense = values.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise InputError(f"{source}: mlp_only_layers must be a list of layers (got {dense!r})")
        layers = range(values["num_hidden_layers"])
        fields["mlp_only_layers"] = tuple(layer for layer in layers if layer in dense or (layer + 1) % max(step, 1))
    return fields


def moe_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of `config.json` for `config.moe`; what the type cannot say is lost, see `check_variants`."""
    moe, kind = config.moe, config.model_type
    if moe is None or kind not in MOE_TYPES:
        return {}
    values: dict[str, Any] = {"num_experts_per_tok": moe.num_experts_per_tok}
    if kind == "mixtral":
        return values | {"num_local_experts": moe.num_experts, "intermediate_size": moe.moe_intermediate_size}
    values |= {"moe_intermediate_size": moe.moe_intermediate_size, "norm_topk_prob": moe.norm_topk_prob}
    if kind in ("qwen2_moe", "qwen3_moe"):
        values |= {
            "num_experts": moe.num_experts,
            "mlp_only_layers": list(moe.mlp_only_layers),
            "decoder_sparse_step": 1,
        }
        shared = {"shared_expert_intermediate_size": moe.shared_expert_intermediate_size}
        return values | (shared if kind == "qwen2_moe" else {})
    grouped = moe.n_group > 1
    values |= {
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_expert_intermediate_size // moe.moe_intermediate_size,
        "first_k_dense_replace": len(moe.mlp_only_layers),
        "routed_scaling_factor": moe.routed_scaling_factor,
        "scoring_func": moe.scoring_func,
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
        "topk_method": "noaux_tc" if moe.router_bias else "group_limited_greedy" if grouped else "greedy",
    }
    return values


def latent_from_hf(values: dict[str, Any], kind: str, source: str) -> dict[str, Any] | None:
    """The fields of `LatentAttentionConfig` in a `config.json` of type `kind`; None for a type without it.

    Raises:
        InputError: a field is not a size, or the attention has biases.
    """
    if kind not in LATENT_TYPES:
        return None
    if values.get("attention_bias"):
        raise InputError(f"{source}: attention_bias is not supported with latent attention")
    values = _LATENT_DEFAULTS | values
    fields: dict[str, Any] = {name: _count(values, name, source) for name in _LATENT_DEFAULTS}
    fields["rope_interleave"] = values.get("rope_interleave", True) if kind == "deepseek_v3" else True
    # null means that queries are not compressed; values without it mean DeepSeek's 1536
    fields["q_lora_rank"] = values.get("q_lora_rank", 1536)
    return fields


def latent_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of `config.json` for `config.latent_attention`."""
    latent = config.latent_attention
    if latent is None or config.model_type not in LATENT_TYPES:
        return {}
    # transformers calls the rotated dimensions head_dim; multi-token prediction layers are not kept
    values = latent.model_dump() | {"head_dim": latent.qk_rope_head_dim, "attention_bias": False}
    return values | ({"num_nextn_predict_layers": 0} if config.model_type == "deepseek_v3" else {})


def check_variants(config: DecoderConfig) -> list[str]:
    """The variants of `config` that its Hugging Face type cannot say, as "name=value"."""
    kind = config.model_type
    lost = [f"shared_layers={config.shared_layers}"] if config.shared_layers > 1 else []
    for name, types in (("moe", MOE_TYPES), ("latent_attention", LATENT_TYPES)):
        if (getattr(config, name) is not None) != (kind in types):
            lost.append(name if getattr(config, name) is not None else f"{name}=None")
    if lost:
        return lost
    values = {"num_hidden_layers": config.num_hidden_layers, **moe_to_hf(config), **latent_to_hf(config)}
    written = (
        ("moe", config.moe, MoEConfig, moe_from_hf),
        ("latent_attention", config.latent_attention, LatentAttentionConfig, latent_from_hf),
    )
    for name, ours, config_type, read in written:
        if (
            ours is not None
            and (theirs := config_type.model_construct(**(read(values, kind, "config.json") or {}))) != ours
        ):
            different = [field for field in config_type.model_fields if getattr(ours, field) != getattr(theirs, field)]
            lost += [f"{name}.{field}={getattr(ours, field)}" for field in different]
    return lost


def _deepseek_moe(values: dict[str, Any], kind: str, source: str) -> dict[str, Any]:
    sigmoid = kind != "deepseek_v2"
    expected = {"scoring_func": "sigmoid" if sigmoid else "softmax", "moe_layer_freq": 1}
    for name, wanted in expected.items():
        if (given := values.get(name, wanted)) != wanted:
            raise InputError(f"{source}: {name} {given!r} is not supported for {kind}; supported: {wanted!r}")
    method = values.get("topk_method", "noaux_tc" if sigmoid else "greedy")
    methods = ("noaux_tc",) if sigmoid else ("greedy", "group_limited_greedy")
    if method not in methods:
        raise InputError(
            f"{source}: topk_method {method!r} is not supported for {kind}; supported: {', '.join(methods)}"
        )
    if not sigmoid and values.get("norm_topk_prob"):
        raise InputError(f"{source}: norm_topk_prob is not supported for {kind}; transformers ignores it there")
    inner = _count(values, "moe_intermediate_size", source)
    first_dense = _count({"first_k_dense_replace": 0} | values, "first_k_dense_replace", source)
    fields: dict[str, Any] = {
        "num_experts": _count(values, "n_routed_experts", source),
        "num_experts_per_tok": _count(values, "num_experts_per_tok", source),
        "moe_intermediate_size": inner,
        "scoring_func": expected["scoring_func"],
        "norm_topk_prob": values.get("norm_topk_prob", False),
        "routed_scaling_factor": values.get("routed_scaling_factor", 1.0),
        "shared_expert_intermediate_size": inner * _count({"n_shared_experts": 0} | values, "n_shared_experts", source),
        "router_bias": sigmoid,
        "mlp_only_layers": tuple(range(min(first_dense, values["num_hidden_layers"]))),
    }
    if method != "greedy":
        fields |= {"n_group": values.get("n_group", 1), "topk_group": values.get("topk_group", 1)}
    return fields


def _count(values: dict[str, Any], name: str, source: str) -> int:
    value = values.get(name)
    if value is None:
        raise InputError(f"{source} lacks {name}; get the complete config.json of the model")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InputError(f"{source}: {name} must be a whole number (got {value!r})")
    return value
