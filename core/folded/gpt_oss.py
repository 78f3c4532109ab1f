"""gpt-oss: heads with sinks, and experts with biases and an activation of their own."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, number_of, sliding_of
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


GPT_OSS: dict[str, Family] = {
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
    )
}
