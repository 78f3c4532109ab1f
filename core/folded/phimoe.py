"""Phi with experts (Phi-3.5-MoE, Phi-mini-MoE): norms that subtract the mean, and two experts that are weighed each by
itself."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import centred
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of, number_of, whole_of

_SPELLED = {"gate": "w1", "up": "w3", "down": "w2"}


def _phimoe(values: Values, source: str) -> Fold:
    if (chosen := values["num_experts_per_tok"]) != 2:
        raise InputError(f"{source}: num_experts_per_tok={chosen!r} is not supported; 2 is")
    moe = {
        "num_experts": count_of(values, "num_local_experts", source),
        "num_experts_per_tok": 2,
        "moe_intermediate_size": whole_of(values, "intermediate_size", source),
        "scoring_func": "sparsemixer",
        "router_jitter_noise": values["router_jitter_noise"],
        "norm_topk_prob": False,
        "biases": True,
    }
    bias = ("qkv", "out") if flag_of(values, "attention_bias", source) else ()
    bias += ("head",) if flag_of(values, "lm_head_bias", source) else ()
    changes, how = centred(values, source, "norm", "shift", *bias)
    rope, context = _rotary(values, source)
    changes |= {"mlp_bias": False, "moe": moe, "sliding_window": values.get("sliding_window")} | context
    config = config_of(values, source, rope, **changes)
    published = {f"mlp.experts.*.{ours}_proj": f"block_sparse_moe.experts.*.{each}" for ours, each in _SPELLED.items()}
    spelled = {ours: (theirs, ours) for ours, theirs in published.items()}
    spelled["mlp.gate"] = ("block_sparse_moe.gate", "mlp.router")
    return Fold(config, spelled=spelled, **how)


def _rotary(values: Values, source: str) -> tuple[Values, Values]:
    """Rotary settings as Llama spells them, and the context: of longrope the original one, since beyond it transformers
    rotates as within and multiplies otherwise."""
    rope: Values = {"rope_theta": values["rope_theta"]}
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(section := values.get(name) or {}, dict):
            raise InputError(f"{source}: {name} must be an object (got {section!r})")
        rope |= section
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": rope["rope_theta"]}, {}
    if kind != "longrope":
        raise InputError(f"{source}: rotary scaling {kind!r} of phimoe is not supported; longrope is")
    original = number_of(rope, "original_max_position_embeddings", source)
    factor = number_of(rope, "short_mscale", source)
    context = int(min(original, number_of(values, "max_position_embeddings", source)))
    return {"rope_parameters": rope | {"attention_factor": factor}}, {"max_position_embeddings": context}


# What transformers assumes when a config.json leaves the field out.
PHIMOE: dict[str, Family] = {
    "phimoe": Family(
        _phimoe,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.01,
            "attention_bias": False,
            "lm_head_bias": False,
        },
        also="PhiMoEForCausalLM",  # as it was published
        aliases={"num_experts": "num_local_experts"},
    )
}
