"""Granite and its kin: embeddings, residuals, scores and logits are multiplied by numbers of the configuration."""

from __future__ import annotations

from typing import Any

from penjing.core.errors import InputError
from penjing.core.folded.fold import (
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    flag_of,
    latent_of,
    number_of,
    sliding_of,
    whole_of,
)
from penjing.core.models.config import DecoderConfig

_HALVES = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}


def _granite(values: Values, source: str) -> Fold:
    return _scaled(config_of(values, source), values, source)


def _granite_moe(values: Values, source: str) -> Fold:
    return _with_experts(values, source, {})


def _with_experts(values: Values, source: str, changes: Values) -> Fold:
    """Experts, and the MLP that all tokens take beside them where there is one, hold gate and up together."""
    moe = {
        "num_experts": count_of(values, "num_local_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": whole_of(values, "intermediate_size", source),
        "shared_expert_intermediate_size": whole_of(values, "shared_intermediate_size", source),
    }
    names = {f"mlp.experts.*.{part}_proj": f"block_sparse_moe.experts.*.{part}_proj" for part in ("gate", "up", "down")}
    names |= {f"mlp.shared_experts.{ours}": f"shared_mlp.{theirs}" for ours, theirs in _HALVES.items()}
    router = {"mlp.gate": ("block_sparse_moe.router.layer", "block_sparse_moe.router")}
    config = config_of(values, source, moe=moe, **changes)
    return _scaled(config, values, source, names, spelled=router, fused_mlp=True)


def _granite_swa(values: Values, source: str) -> Fold:
    """Most layers slide, each head has a sink, and layers may rotate by one of two bases or not at all."""
    layers = count_of(values, "num_hidden_layers", source)
    types = ["full_attention" if layer % 4 == 0 else "sliding_attention" for layer in range(layers)]
    changes = sliding_of({"layer_types": types} | values, source, 0)
    bases = values.get("layer_rope_theta")
    if bases is not None:
        if not isinstance(bases, list) or len(bases) != layers or any(type(each) not in (int, float) for each in bases):
            raise InputError(f"{source}: layer_rope_theta must have a number for each of {layers} layers")
        used = sorted({float(each) for each in bases if each})
        scaled = (values.get("rope_parameters") or {}).get("rope_type", "default") != "default"
        if len(used) > 2 - scaled:
            raise InputError(f"{source}: layer_rope_theta has {len(used)} bases, more than layers of ours rotate by")
        kinds = {0.0: "none"} | dict(zip(used, ("main", "local"), strict=False))
        changes["layer_rotary"] = [kinds[float(each)] for each in bases]
        if used:
            changes["rope_theta"] = used[0]
            changes["rope_local_theta"] = used[-1]
    changes["attention_sinks"] = True
    if values["model_type"] == "granitemoe_swa":
        return _with_experts(values, source, changes)
    return _scaled(config_of(values, source, **changes), values, source)


def _granite_hybrid(values: Values, source: str) -> Fold:
    """Granite 4 where all layers have attention, with experts beside the MLP or without."""
    kinds = values.get("layer_types") or values.get("layers_block_type") or ["mamba"]
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= {"attention", "full_attention"}:
        raise InputError(f"{source}: layer_types names layers without attention, which are not supported")
    position = values.get("position_embedding_type")
    if position not in ("rope", "nope", None):
        raise InputError(f"{source}: position_embedding_type {position!r} is not supported; rope, nope and null are")
    layers = count_of(values, "num_hidden_layers", source)
    rotary = None if position == "rope" else ["none"] * layers
    if values["num_local_experts"] != 0:
        return _with_experts(values, source, {"layer_rotary": rotary})
    config = config_of(values | {"intermediate_size": values["shared_intermediate_size"]}, source, layer_rotary=rotary)
    names = {f"mlp.{ours}": f"shared_mlp.{theirs}" for ours, theirs in _HALVES.items()}
    return _scaled(config, values, source, names, fused_mlp=True)


def _hyperclovax(values: Values, source: str) -> Fold:
    """Logits are multiplied where Granite divides them, and norms may stand behind attention and MLP, too."""
    around = flag_of(values, "use_post_norm", source)
    changes: Values = {"norms": "around"} if around else {}
    config = config_of(values, source, **changes)
    values = values | {"logits_scaling": 1 / number_of(values, "logits_scaling", source)}
    names = {"attention_output_norm": "post_norm1", "mlp_output_norm": "post_norm2"} if around else {}
    return _scaled(config, {"attention_multiplier": config.head_dim**-0.5} | values, source, names)


def _minicpm3(values: Values, source: str) -> Fold:
    """The same numbers under other names, around DeepSeek's latent attention."""
    layers = count_of(values, "num_hidden_layers", source)
    width = number_of(values, "hidden_size", source)
    depth = layers**0.5 if values["scale_depth"] is None else number_of(values, "scale_depth", source)
    base = width if values["dim_model_base"] is None else number_of(values, "dim_model_base", source)
    heads = count_of(values, "num_attention_heads", source)
    config = latent_of({"v_head_dim": int(width // heads)} | values | {"rope_interleave": False}, source)
    named = {
        "embedding_multiplier": values["scale_emb"],
        "logits_scaling": width / base,
        "residual_multiplier": depth / layers**0.5,
        "attention_multiplier": config.head_dim**-0.5,
    }
    return _scaled(config, named, source)


def _scaled(config: DecoderConfig, values: Values, source: str, names: Values | None = None, **how: Any) -> Fold:
    embedding = number_of(values, "embedding_multiplier", source)
    tied = embedding if config.tie_word_embeddings else 1.0
    return Fold(
        config,
        names or {},
        embedding=embedding,
        final=1 / (number_of(values, "logits_scaling", source) * tied),
        query=number_of(values, "attention_multiplier", source) * config.head_dim**0.5,
        residual=number_of(values, "residual_multiplier", source),
        **how,
    )


_EXPERTS: Values = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ONES: Values = dict.fromkeys(("embedding_multiplier", "logits_scaling", "residual_multiplier"), 1.0)
# What transformers assumes when a config.json leaves the field out.
GRANITES: dict[str, Family] = {
    "granite": Family(_granite, {"max_position_embeddings": 2048, "attention_multiplier": 1.0, **_ONES}),
    "granite_swa": Family(
        _granite_swa,
        {
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 4,
            "attention_multiplier": 1.0,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            **_ONES,
        },
    ),
    "granitemoehybrid": Family(
        _granite_hybrid,
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "shared_intermediate_size": 1024,
            **_EXPERTS,
            **_ONES,
        },
    ),
    "granitemoe": Family(
        _granite_moe,
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "shared_intermediate_size": 0,
            **_EXPERTS,
            **_ONES,
        },
    ),
    "granitemoeshared": Family(
        _granite_moe,
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "shared_intermediate_size": 1024,
            **_EXPERTS,
            **_ONES,
        },
    ),
    "granitemoe_swa": Family(
        _granite_swa,
        {
            "max_position_embeddings": 2048,
            "attention_multiplier": 1.0,
            "shared_intermediate_size": 0,
            "sliding_window": 128,
            **_EXPERTS,
            **_ONES,
        },
    ),
    "minicpm3": Family(
        _minicpm3,
        {
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "kv_lora_rank": 256,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
    ),
    "hyperclovax": Family(_hyperclovax, {"max_position_embeddings": 2048, "use_post_norm": True, **_ONES}),
}
