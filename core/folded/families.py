"""Families of decoders that become plain ones when their weights are read: factors, orders and names are folded away.

What a family multiplies (embeddings, residuals, scores, logits) goes into neighbouring weights, which changes no
function: a factor of the embedding leaves a tied LM head through the last norm. Rotated dimensions are put in our
order: heads multiply queries with keys, and both move alike. Norms that multiply by 1 + w become w. What is left are
fields of `DecoderConfig`; where those are Llama's, the folder is a Llama that every engine reads.
"""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import CENTRED
from penjing.core.folded.fold import (
    Family,
    Fold,
    Values,
    config_of,
    count_of,
    number_of,
    partial_of,
    ropes_of,
    sliding_of,
)
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import FOLDED

_AROUND = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_AROUND_GLM = {
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}

_NONE = ("final_logit_softcapping", "attn_logit_softcapping")  # null says that there is none, not what is usual


def folds(values: Values) -> bool:
    """Whether a parsed `config.json` is of a family that is read here."""
    kind = values.get("model_type")
    return isinstance(kind, str) and kind in _FAMILIES


def fold_from_hf(values: Values, source: str) -> Fold:
    """Read a parsed `config.json` of one of these families.

    Raises:
        InputError: it is another kind of model, a field is missing or invalid, or it has what no layer of ours has.
    """
    kind = values["model_type"]
    family = _FAMILIES[kind]
    named = values.get("architectures") or [FOLDED[kind]]
    if not isinstance(named, list) or FOLDED[kind] not in named:
        said = ", ".join(map(str, named)) if isinstance(named, list) else repr(named)
        raise InputError(f"{source}: {said} is not a language model; take a {FOLDED[kind]} folder")
    given = family.defaults | {name: each for name, each in values.items() if each is not None or name in _NONE}
    activation = given.get("hidden_activation") or given.get("hidden_act") or family.activations[0]
    if activation not in family.activations:
        known = " or ".join(family.activations)
        raise InputError(f"{source}: the activation {activation!r} of {kind} is not supported; {known} is")
    return family.read(given | {"hidden_act": activation}, source)


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
    if values.get("use_bidirectional_attention"):
        raise InputError(f"{source}: use_bidirectional_attention is not supported")
    caps = {"final_logit_softcapping": "logit_cap", "attn_logit_softcapping": "attention_cap"}
    capped = {ours: number_of(values, name, source) for name, ours in caps.items() if values[name] is not None}
    changes: Values = capped | sliding_of(values, source, 2)
    config = config_of(values, source, norms="around", activation="gelu_tanh", **changes)
    return _gemma(config, values, source)


def _gemma(config: DecoderConfig, values: Values, source: str) -> Fold:
    scale = number_of(values, "query_pre_attn_scalar", source)
    return Fold(
        config,
        _AROUND,
        plus_one=True,
        embedding=config.hidden_size**0.5,
        final=config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0,
        query=(config.head_dim / scale) ** 0.5,
    )


def _granite(values: Values, source: str) -> Fold:
    config = config_of(values, source)
    embedding = number_of(values, "embedding_multiplier", source)
    return Fold(
        config,
        embedding=embedding,
        final=1 / (number_of(values, "logits_scaling", source) * (embedding if config.tie_word_embeddings else 1.0)),
        query=number_of(values, "attention_multiplier", source) * config.head_dim**0.5,
        residual=number_of(values, "residual_multiplier", source),
    )


def _smollm3(values: Values, source: str) -> Fold:
    layers = count_of(values, "num_hidden_layers", source)
    interval = count_of(values, "no_rope_layer_interval", source)
    rotates = values.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers:
        raise InputError(f"{source}: no_rope_layers must have a number for each of {layers} layers")
    kinds = None if all(rotates) else ["main" if each else "none" for each in rotates]
    sliding: Values = {}
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        types = ["full_attention" if each else "sliding_attention" for each in rotates]
        sliding = sliding_of({"layer_types": types} | values, source, 0)
    return Fold(config_of(values, source, layer_rotary=kinds, **sliding))


def _olmo2(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, norms="after", qk_norm=True, qk_norm_over="all"), _AFTER)


def _olmo3(values: Values, source: str) -> Fold:
    theta = values.get("rope_theta", 10000.0)
    rope, local = ropes_of(values, source, theta, theta)
    sliding = sliding_of(values, source, 4)
    kinds = ["local" if kind == "sliding_attention" else "main" for kind in sliding["layer_types"]]
    changes = {"norms": "after", "qk_norm": True, "qk_norm_over": "all", "layer_rotary": kinds}
    return Fold(config_of(values, source, rope, **changes, **sliding, rope_local_theta=local), _AFTER)


def _exaone4(values: Values, source: str) -> Fold:
    pattern = values.get("sliding_window_pattern", 4)
    layers = count_of(values, "num_hidden_layers", source)
    if pattern == "":
        raise InputError(f"{source}: sliding_window_pattern is empty; it names kinds of layers, such as LLLG")
    if values.get("layer_types") is None and isinstance(pattern, str):
        types = [pattern[layer % len(pattern)] == "L" and layer < layers - 1 for layer in range(layers)]
        values = values | {"layer_types": ["sliding_attention" if near else "full_attention" for near in types]}
    sliding = sliding_of(values, source, 0 if isinstance(pattern, str) else pattern)
    hybrid = values.get("sliding_window") is not None
    kinds = ["main" if kind == "sliding_attention" else "none" for kind in sliding["layer_types"]] if hybrid else None
    return Fold(config_of(values, source, norms="after", qk_norm=True, layer_rotary=kinds, **sliding), _AFTER)


def _phi3(values: Values, source: str) -> Fold:
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := values.get(name), dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            values = values | {name: rope | {"rope_type": "longrope"}}  # what older folders call it
    window = {"sliding_window": values["sliding_window"]} if values.get("sliding_window") else {}
    config, rotary = partial_of(values, source, **window)
    return Fold(config, fused=True, fused_mlp=True, rotary=rotary)


def _glm(values: Values, source: str) -> Fold:
    changes: Values = {"attention_bias": bool(values["attention_bias"]), "attention_output_bias": False}
    around = values["model_type"] == "glm4"
    config, rotary = partial_of(values, source, **changes | ({"norms": "around"} if around else {}))
    names = _AROUND_GLM if around else {}
    return Fold(config, names, fused_mlp=True, rotary=rotary, interleaved=True)


def _interleaved(values: Values, source: str) -> Fold:
    changes: Values = {"attention_output_bias": False}
    if values["model_type"] == "ernie4_5":
        changes = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), bool(values.get("use_bias")))
    config = config_of(values, source, **changes)
    return Fold(config, interleaved=True)


def _arcee(values: Values, source: str) -> Fold:
    config = config_of(values, source, mlp_gated=False, activation="relu2")
    return Fold(config, {"mlp.gate_proj": "mlp.up_proj"})


def _ministral(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, **sliding_of(values, source, 0)))


def _seed_oss(values: Values, source: str) -> Fold:
    return Fold(config_of(values, source, attention_output_bias=bool(values.get("attention_out_bias"))))


# What transformers assumes when a config.json leaves the field out.
_FAMILIES: dict[str, Family] = {
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
    "gemma2": Family(
        _gemma2,
        {
            "head_dim": 256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        ("gelu_pytorch_tanh",),
    ),
    "arcee": Family(_arcee, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}, ("relu2",)),
    "granite": Family(
        _granite,
        {
            "max_position_embeddings": 2048,
            **dict.fromkeys(
                ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
            ),
        },
    ),
    "smollm3": Family(
        _smollm3,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Family(_olmo2, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "olmo3": Family(_olmo3, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "phi3": Family(_phi3, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "exaone4": Family(_exaone4, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_key_value_heads": 32}),
    "glm": Family(
        _glm,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
    ),
    "glm4": Family(
        _glm,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1.5625e-7,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338],
        },
    ),
    "helium": Family(
        _interleaved,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128},
    ),
    "ernie4_5": Family(
        _interleaved,
        {
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
    ),
    "ministral": Family(
        _ministral, {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "seed_oss": Family(
        _seed_oss,
        {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
} | CENTRED
