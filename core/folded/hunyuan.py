"""Hunyuan, dense and with experts: its queries and keys are rotated before their norms."""

from __future__ import annotations

from typing import Any

from penjing.core.errors import InputError
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, number_of

_NAMES = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
    "mlp.gate": "mlp.gate.wg",
    "mlp.shared_experts.gate_proj": "mlp.shared_mlp.gate_proj",
    "mlp.shared_experts.up_proj": "mlp.shared_mlp.up_proj",
    "mlp.shared_experts.down_proj": "mlp.shared_mlp.down_proj",
}


def _hunyuan(values: Values, source: str, moe: Values | None = None) -> Fold:
    """Norms of heads follow the rotation, whose base may have a factor, `alpha`, that goes by the name of dynamic."""
    theta, scaling = values.get("rope_theta", 10000.0), Values()
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(section := values.get(name) or {}, dict):
            raise InputError(f"{source}: {name} must be an object (got {section!r})")
        scaling |= section
    changes: Values = {"qk_norm": True, "qk_norm_rotated": True, "moe": moe}
    rope: Values = {"rope_parameters": {"rope_theta": theta, **scaling}}
    if scaling.get("rope_type", scaling.get("type")) == "dynamic" and scaling.get("alpha"):
        size = config_of(values, source, {}, **changes).head_dim
        if size < 4:
            raise InputError(f"{source}: head_dim={size}: alpha needs at least 4")
        base = number_of({"rope_theta": theta} | scaling, "rope_theta", source)
        rope = {"rope_theta": base * number_of(scaling, "alpha", source) ** (size / (size - 2))}
    return Fold(config_of(values, source, rope, **changes), _NAMES)


def _hunyuan_moe(values: Values, source: str) -> Fold:
    """Experts are as wide as the MLP that stands beside them in each layer."""
    if (shared := _one_of(values, "num_shared_expert", source)) not in (None, 1):
        raise InputError(f"{source}: num_shared_expert={shared!r} is not supported; 1 is")
    inner = count_of(values, "intermediate_size", source, most=1_000_000)
    counts = {name: _one_of(values, name, source) for name in ("num_experts", "moe_topk")}
    moe = {
        "num_experts": count_of(counts, "num_experts", source),
        "num_experts_per_tok": count_of(counts, "moe_topk", source),
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": inner,
    }
    return _hunyuan(values, source, moe)


def _one_of(values: Values, name: str, source: str) -> Any:
    """A number of all layers, which a list says for each."""
    value = values.get(name)
    if not isinstance(value, list):
        return value
    layers = count_of(values, "num_hidden_layers", source)
    if len(value) != layers or any(each != value[0] for each in value):
        raise InputError(f"{source}: {name} must be the same number for each of {layers} layers")
    return value[0]


_USUAL: Values = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
# What transformers assumes when a config.json leaves the field out.
HUNYUANS: dict[str, Family] = {
    "hunyuan_v1_dense": Family(_hunyuan, _USUAL),
    "hunyuan_v1_moe": Family(
        _hunyuan_moe,
        _USUAL | {"num_experts": 1, "moe_topk": 1},
        aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    ),
}
