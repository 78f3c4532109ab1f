"""gpt-oss and MiMo-V2-Flash: heads with sinks, in MiMo those of layers that slide, which have more keys; experts of
gpt-oss have biases and an activation of their own."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.fold import (
    Family,
    Fold,
    LayerHeads,
    Values,
    config_of,
    count_of,
    dense_of,
    number_of,
    ropes_of,
    sliding_of,
)
from penjing.core.models.hf_variants import moe_from_hf
from penjing.kernels.swiglu import CLAMP, STEEPNESS

NAME = "gpt_oss"


def _gpt_oss(values: Values, source: str) -> Fold:
    for name, usual in (("swiglu_limit", CLAMP), ("swiglu_alpha", STEEPNESS)):
        if values.get(name, usual) != usual:
            raise InputError(f"{source}: {name}={values[name]!r} is not supported")
    layers = count_of(values, "num_hidden_layers", source)
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    inner = int(number_of(values, "intermediate_size", source))
    experts = {
        "num_experts": count_of(values, "num_local_experts", source),
        "num_experts_per_tok": count_of(values, "num_experts_per_tok", source),
        "moe_intermediate_size": inner,
        "biases": True,
        "activation": "clamped_swiglu",
    }
    config = config_of(
        values, source, attention_sinks=True, moe=experts, **sliding_of({"layer_types": types} | values, source, 0)
    )
    return Fold(config, {"mlp.gate": "mlp.router"})


def _mimo(values: Values, source: str) -> Fold:
    layers, keys = (count_of(values, name, source) for name in ("num_hidden_layers", "num_key_value_heads"))
    types = ["full_attention" if layer == 0 or (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
    if values.get("sliding_window_size") is not None:  # as it was published: without the query's own
        values = values | {"sliding_window": count_of(values, "sliding_window_size", source, most=2**30) + 1}
    sliding = sliding_of({"layer_types": types} | values, source, 0)
    slides = [kind == "sliding_attention" for kind in sliding["layer_types"]]
    size, narrow = (count_of(values, name, source, most=_WIDEST) for name in ("head_dim", "v_head_dim"))
    if narrow % 2 or narrow > size:
        raise InputError(f"{source}: v_head_dim={narrow} must be even, and no more than head_dim={size}")
    sections = values.get("rope_parameters") or _MIMO_ROPES
    used = {kind: sections.get(kind) if isinstance(sections, dict) else None for kind in sliding["layer_types"]}
    if any(not isinstance(each, dict) or each.get("rope_type", "default") != "default" for each in used.values()):
        raise InputError(f"{source}: rope_parameters must have plain rotary settings for each kind of layer")
    shares = {number_of(_MIMO_SHARE | each, "partial_rotary_factor", source) for each in used.values() if each}
    rotary = int(size * max(shares, default=0.0))
    if len(shares) != 1 or rotary < 2 or rotary % 2 or rotary > size:
        raise InputError(f"{source}: partial_rotary_factor {sorted(shares)} of {size} dimensions is no even number")
    plain = {kind: {"rope_theta": number_of(each or {}, "rope_theta", source)} for kind, each in used.items()}
    rope, local = ropes_of({"rope_parameters": {_MIMO[0]: {"rope_theta": 1e4}} | plain}, source, 5e6, 1e4)
    moe = moe_from_hf(values | {"first_k_dense_replace": 0}, "dots1", source)
    assert moe is not None
    changes: Values = {
        "moe": moe | {"mlp_only_layers": dense_of(values, source, 1)},
        "attention_sinks": any(slides),
        "attention_output_bias": False,
        "rotary_pairs": rotary // 2 if rotary < size else None,
        "layer_rotary": ["local" if each else "main" for each in slides] if any(slides) else None,
        "rope_local_theta": local,
    }
    most = 2 * keys if any(slides) else keys
    config = config_of(values | {"num_key_value_heads": most}, source, rope, **changes, **sliding)
    scale = values.get("attention_value_scale")
    return Fold(
        config,
        rotary=0 if rotary == size else rotary,
        value=1.0 if scale is None else number_of(values, "attention_value_scale", source),
        layer_heads=tuple(LayerHeads(size, 2 * keys if each else keys, values=narrow, sinks=each) for each in slides),
        spelled={
            "self_attn.sinks": ("self_attn.attention_sink_bias", "self_attn.sinks"),
            "mlp.e_score_correction_bias": ("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"),
        },
        apart=("model.mtp.",),
    )


_WIDEST = 65_536  # dimensions of a head
_MIMO = ("full_attention", "sliding_attention")
_MIMO_SHARE = {"partial_rotary_factor": 0.334}
_MIMO_ROPES = {kind: {"rope_theta": theta} for kind, theta in zip(_MIMO, (5e6, 1e4), strict=True)}
GPT_OSS: dict[str, Family] = {
    "mimo_v2_flash": Family(
        _mimo,
        {
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 129,
            "attention_value_scale": 0.707,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 0,
            "norm_topk_prob": True,
        },
        aliases={"num_local_experts": "n_routed_experts"},
    ),
    NAME: Family(
        _gpt_oss,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
}
