"""Families with experts whose attention and norms are those of others: most choose experts as DeepSeek's do."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import refuse
from penjing.core.folded.fold import (
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    dense_of,
    flag_of,
    latent_of,
    number_of,
    partial_of,
    ropes_of,
    sliding_of,
    unrotated_of,
    whole_of,
)
from penjing.core.models.hf_variants import moe_from_hf

_BIAS = "mlp.e_score_correction_bias"
_INSIDE = {_BIAS: ("mlp.gate.e_score_correction_bias", _BIAS)}
_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}


def _olmoe(values: Values, source: str) -> Fold:
    refuse(values, source, "clip_qkv")
    count_of(values, "num_hidden_layers", source)
    moe = moe_from_hf(values | {"moe_intermediate_size": values.get("intermediate_size")}, "qwen3_moe", source)
    after = values["model_type"] == "flex_olmo"
    changes: Values = {"norms": "after"} if after else {}
    config = config_of(values, source, qk_norm=True, qk_norm_over="all", moe=moe, **changes)
    return Fold(config, _AFTER if after else {})


def _glm4_moe(values: Values, source: str) -> Fold:
    count_of(values, "num_hidden_layers", source)
    moe = moe_from_hf(values, "dots1", source)
    changes: Values = {"attention_output_bias": False, "qk_norm": flag_of(values, "use_qk_norm", source), "moe": moe}
    config, rotary = partial_of(values, source, **changes)
    return Fold(config, rotary=rotary, more_layers=True, spelled=_INSIDE)


def _glm4_moe_lite(values: Values, source: str) -> Fold:
    return Fold(latent_of(values, source, moe=_deepseek(values, source, 1)), more_layers=True, spelled=_INSIDE)


def _solar_open(values: Values, source: str) -> Fold:
    """All layers have experts, so that no width of an MLP is named."""
    values = values | {"intermediate_size": whole_of(values, "moe_intermediate_size", source)}
    return Fold(
        config_of(values, source, attention_output_bias=False, moe=_deepseek(values, source, 0)), spelled=_INSIDE
    )


def _hy_v3(values: Values, source: str) -> Fold:
    refuse(values, source, "mlp_bias")
    count_of(values, "num_shared_experts", source)
    named = {
        "n_routed_experts": values.get("num_experts"),
        "n_shared_experts": values["num_shared_experts"],
        "routed_scaling_factor": number_of(values, "router_scaling_factor", source),
        "norm_topk_prob": True,
    }
    config = config_of(values, source, qk_norm=True, moe=_deepseek(values | named, source, 1))
    shared = {f"mlp.shared_experts.{part}_proj": f"mlp.shared_mlp.{part}_proj" for part in _MIXTRAL}
    published = {"mlp.gate": "mlp.router.gate", _BIAS: "mlp.expert_bias"} | shared
    return Fold(config, spelled={ours: (theirs, ours) for ours, theirs in published.items()}, more_layers=True)


def _exaone_moe(values: Values, source: str) -> Fold:
    named = {"n_routed_experts": values.get("num_experts"), "n_shared_experts": values.get("num_shared_experts")}
    moe = _deepseek(values | named, source, whole_of(values, "first_k_dense_replace", source))
    config = config_of(values, source, qk_norm=True, moe=moe, **unrotated_of(values, source))
    return Fold(config, spelled={_BIAS: (_BIAS, *_INSIDE[_BIAS])}, apart=("mtp.",))


def _minimax_m2(values: Values, source: str) -> Fold:
    if values.get("rotary_dim") is not None:  # as it was published
        share = whole_of(values, "rotary_dim", source) / count_of(values, "head_dim", source)
        values = {"partial_rotary_factor": share} | values
    moe = {
        "num_experts": count_of(values, "num_local_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": whole_of(values, "intermediate_size", source),
        "scoring_func": "sigmoid",
        "router_bias": True,
    }
    config, rotary = partial_of(
        values, source, attention_bias=False, attention_output_bias=False, qk_norm=True, qk_norm_over="all", moe=moe
    )
    inside = {f"mlp.experts.*.{ours}_proj": f"experts.*.{theirs}" for ours, theirs in _MIXTRAL.items()}
    published = inside | {"mlp.gate": "gate", _BIAS: "e_score_correction_bias"}
    spelled = {ours: (f"block_sparse_moe.{theirs}", ours) for ours, theirs in published.items()}
    return Fold(config, rotary=rotary, spelled=spelled)


def _ernie4_5_moe(values: Values, source: str) -> Fold:
    """Experts stand in every so manieth of some layers. A bias is added to shares, not to logistic scores."""
    refuse(values, source, "use_bias")
    if (least := number_of(values, "moe_norm_min", source)) > _NORM_MIN:
        raise InputError(f"{source}: moe_norm_min={least:g} is not supported; it may be {_NORM_MIN:g} or less")
    layers, every = count_of(values, "num_hidden_layers", source), count_of(values, "moe_layer_interval", source)
    begin, end = (values[f"moe_layer_{name}_index"] for name in ("start", "end"))
    if type(begin) is not int or type(end) is not int:
        raise InputError(f"{source}: moe_layer_start_index and moe_layer_end_index must be whole numbers")
    end = layers - 1 if end == -1 else end
    inner = whole_of(values, "moe_intermediate_size", source)
    moe = {
        "num_experts": count_of(values, "moe_num_experts", source),
        "num_experts_per_tok": count_of(values, "moe_k", source),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner * whole_of(values, "moe_num_shared_experts", source),
        "router_bias": True,
        "mlp_only_layers": [at for at in range(layers) if (at + 1) % every or not begin <= at <= end],
    }
    config = config_of(values, source, attention_bias=False, attention_output_bias=False, mlp_bias=False, moe=moe)
    statics = "mlp.{}moe_statics.e_score_correction_bias"
    spelled = {_BIAS: (statics.format(""), statics.format("gate."))}
    return Fold(config, interleaved=True, spelled=spelled, apart=("mtp", "model.mtp"))


def _mellum(values: Values, source: str) -> Fold:
    rope, local = ropes_of(values, source, 500000.0, 10000.0)
    sliding = sliding_of(values, source, 1)
    bases = ["local" if kind == "sliding_attention" else "main" for kind in sliding["layer_types"]]
    if "local" in bases:
        sliding |= {"layer_rotary": bases, "rope_local_theta": local}
    moe = {
        "num_experts": count_of(values, "num_local_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": whole_of(values, "moe_intermediate_size", source),
        "norm_topk_prob": flag_of(values, "norm_topk_prob", source),
        "mlp_only_layers": dense_of(values, source, 0),
    }
    return Fold(config_of(values, source, rope, qk_norm=True, moe=moe, **sliding), apart=("mtp.",))


def _flint(values: Values, source: str) -> Fold:
    """Heads have sinks, layers that see all do not rotate, and scores of experts are logistic."""
    layers = count_of(values, "num_hidden_layers", source)
    full = [layer < 2 or layer % 4 == 1 or layer == layers - 1 for layer in range(layers)]
    types = ["full_attention" if each else "sliding_attention" for each in full]
    changes = sliding_of({"layer_types": types} | values, source, 0)
    changes["layer_rotary"] = ["main" if kind == "sliding_attention" else "none" for kind in changes["layer_types"]]
    moe = moe_from_hf(values, "qwen2_moe", source)
    assert moe is not None
    changes["moe"] = moe | {"scoring_func": "sigmoid", "shared_expert_gate": False}
    config = config_of(values, source, qk_norm=True, attention_sinks=True, **changes)
    names = {f"mlp.shared_experts.{part}_proj": f"mlp.shared_expert.{part}_proj" for part in _MIXTRAL}
    return Fold(config, names, spelled={"self_attn.sinks": ("self_attn.softmax_offset", "self_attn.sinks")})


def _kolibri1(values: Values, source: str) -> Fold:
    """All layers have experts, and the bias of their choice is added to what the router gives."""
    inner = whole_of(values, "moe_intermediate_size", source)
    moe = {
        "num_experts": count_of(values, "num_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": whole_of(values, "shared_expert_intermediate_size", source),
        "scoring_func": "sigmoid",
        "norm_topk_prob": flag_of(values, "norm_topk_prob", source),
        "router_bias": True,
        "router_bias_of": "logits",
    }
    layers = unrotated_of(values | {"sliding_window_pattern": 5}, source)
    changes: Values = {"attention_bias": False, "attention_output_bias": False, "norms": "around", "qk_norm": True}
    config = config_of(values | {"intermediate_size": inner}, source, moe=moe, **changes, **layers)
    spelled = {
        "attention_output_norm": ("post_attn_norm", "post_self_attn_layernorm"),
        "mlp_output_norm": ("post_ffn_norm", "post_mlp_layernorm"),
        _BIAS: ("moe.router.expert_bias", *_INSIDE[_BIAS]),
    }
    return Fold(config, spelled=spelled)


def _deepseek(values: Values, source: str, first: int) -> Values:
    """Experts that are chosen as DeepSeek-V3's, in layers of which the `first` have none unless all are named."""
    count_of(values, "num_hidden_layers", source)
    moe = moe_from_hf(values | {"first_k_dense_replace": 0}, "dots1", source)
    assert moe is not None
    return moe | {"mlp_only_layers": dense_of(values, source, first)}


_NORM_MIN = 1e-12  # the least sum of chosen shares that ERNIE divides by, as published; shares of a softmax are above
_GLM: Values = {
    "rms_norm_eps": 1e-5,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}
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
        aliases={"num_local_experts": "num_experts"},
    ),
    "flex_olmo": Family(
        _olmoe,
        {
            "max_position_embeddings": 4096,
            "rope_theta": 500000.0,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "norm_topk_prob": False,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    "glm4_moe": Family(
        _glm4_moe,
        _GLM
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
        },
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "glm4_moe_lite": Family(
        _glm4_moe_lite,
        _GLM
        | {
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_routed_experts": 64,
            "routed_scaling_factor": 1.8,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
        },
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "solar_open": Family(
        _solar_open,
        _GLM
        | {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 1e6,
            "moe_intermediate_size": 1280,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
        },
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    "hy_v3": Family(
        _hy_v3,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 11158840.0,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1536,
            "router_scaling_factor": 2.826,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
    "exaone_moe": Family(
        _exaone_moe,
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        also="ExaoneMoEForCausalLM",
        aliases={"num_local_experts": "num_experts"},
    ),
    "minimax_m2": Family(
        _minimax_m2,
        {
            "max_position_embeddings": 196608,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        aliases={"num_experts": "num_local_experts"},
    ),
    "ernie4_5_moe": Family(
        _ernie4_5_moe,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 500000.0,
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "mellum": Family(
        _mellum,
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 1024,
            "num_local_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
        },
        aliases={"num_experts": "num_local_experts"},
    ),
    "flint": Family(
        _flint,
        {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 513,
            "num_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 1024,
            "norm_topk_prob": True,
            "mlp_only_layers": [0, 1],
        },
    ),
    "kolibri1": Family(
        _kolibri1,
        {
            "max_position_embeddings": 262144,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 513,
            "num_experts": 384,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": False,
        },
        aliases={"num_local_experts": "num_experts"},
    ),
}
