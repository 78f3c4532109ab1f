"""Gemma and its kin: embeddings grow with the width, norms multiply by 1 + w, the MLP's gate is a GELU."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.fold import Family, Fold, Values, config_of, number_of, ropes_of, sliding_of
from penjing.core.models.config import DecoderConfig

_AROUND = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_BEFORE = {"post_attention_layernorm": "pre_feedforward_layernorm"}


def _gemma3(values: Values, source: str) -> Fold:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if values.get(name):
            raise InputError(f"{source}: {name}={values[name]!r} is not supported")
    rope, local = ropes_of(values, source, 1e6, 1e4)
    sliding = sliding_of(values, source, values.get("sliding_window_pattern", 6))
    kinds = ["local" if kind == "sliding_attention" else "main" for kind in sliding["layer_types"]]
    changes = {"norms": "around", "qk_norm": True, "activation": "gelu_tanh", "layer_rotary": kinds}
    config = config_of(values, source, rope, **changes, **sliding, rope_local_theta=local)
    return _gemma(config, values, source)


def _gemma2(values: Values, source: str) -> Fold:
    _check_causal(values, source)
    caps = {"final_logit_softcapping": "logit_cap", "attn_logit_softcapping": "attention_cap"}
    capped = {ours: number_of(values, name, source) for name, ours in caps.items() if values[name] is not None}
    changes: Values = capped | sliding_of(values, source, 2)
    norms = "before" if values["model_type"] == "vaultgemma" else "around"
    config = config_of(values, source, norms=norms, activation="gelu_tanh", **changes)
    return _gemma(config, values, source)


def _gemma1(values: Values, source: str) -> Fold:
    _check_causal(values, source)
    config = config_of(values, source, activation="gelu_tanh")
    return _gemma(config, values | {"query_pre_attn_scalar": config.head_dim}, source)


def _check_causal(values: Values, source: str) -> None:
    if values.get("use_bidirectional_attention"):
        raise InputError(f"{source}: use_bidirectional_attention is not supported")


def _gemma(config: DecoderConfig, values: Values, source: str) -> Fold:
    scale = number_of(values, "query_pre_attn_scalar", source)
    names = _AROUND if config.norms == "around" else _BEFORE if values["model_type"] == "vaultgemma" else {}
    return Fold(
        config,
        names,
        plus_one=True,
        embedding=config.hidden_size**0.5,
        final=config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0,
        query=(config.head_dim / scale) ** 0.5,
    )


_GEMMA2: Values = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
# What transformers assumes when a config.json leaves the field out.
GEMMAS: dict[str, Family] = {
    "gemma": Family(
        _gemma1,
        {"head_dim": 256, "num_key_value_heads": 16, "max_position_embeddings": 8192, "tie_word_embeddings": True},
        ("gelu_pytorch_tanh", "gelu"),
    ),
    "gemma2": Family(_gemma2, _GEMMA2, ("gelu_pytorch_tanh",)),
    "vaultgemma": Family(_gemma2, _GEMMA2, ("gelu_pytorch_tanh",)),
    "gemma3_text": Family(
        _gemma3,
        {
            "head_dim": 256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        ("gelu_pytorch_tanh",),
    ),
}
