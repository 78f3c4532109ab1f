"""Families of decoders that become plain ones when their weights are read: factors, orders and names are folded away.

What a family multiplies (embeddings, residuals, scores, logits) goes into neighbouring weights, which changes no
function: a factor of the embedding leaves a tied LM head through the last norm. Rotated dimensions are put in our
order: heads multiply queries with keys, and both move alike. Norms that multiply by 1 + w become w. What is left are
fields of `DecoderConfig`; where those are Llama's, the folder is a Llama that every engine reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import FOLDED, NATIVE, decoder_config_from_hf, decoder_config_to_hf

Values = dict[str, Any]
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
_PLAIN_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Fold:
    """A network as it is stored and how its tensors become those of `config`.

    Attributes:
        names: norm of ours in a layer → its name in the folder.
        fused: q, k, v are one matrix `qkv_proj` there.
        fused_mlp: gate and up are one matrix `gate_up_proj` there.
        plus_one: norms multiply by 1 + w.
        embedding, final: factors of the embedding and of the last norm.
        query: factor of the queries.
        residual: factor of what attention and MLP add.
        rotary: dimensions of a head that rotate, the first ones.
        interleaved: 2i and 2i + 1 rotate together there; else i and i + rotary / 2.
    """

    config: DecoderConfig
    names: dict[str, str] = field(default_factory=dict)
    fused: bool = False
    fused_mlp: bool = False
    plus_one: bool = False
    embedding: float = 1.0
    final: float = 1.0
    query: float = 1.0
    residual: float = 1.0
    rotary: int = 0
    interleaved: bool = False


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
    given = family.defaults | {name: value for name, value in values.items() if value is not None}
    activation = given.get("hidden_activation") or given.get("hidden_act") or family.activation
    if activation not in (("silu", "swish") if family.activation == "silu" else (family.activation,)):
        raise InputError(f"{source}: the activation {activation!r} of {kind} is not supported; {family.activation} is")
    return family.read(given, source)


@dataclass(frozen=True)
class _Family:
    read: Callable[[Values, str], Fold]
    defaults: Values
    activation: str = "silu"


def _config(values: Values, source: str, rope: Values | None = None, **changes: Any) -> DecoderConfig:
    """The common fields as Llama reads them, and `changes`; of a type that others read where one has it."""
    apart = ("model_type", "architectures", "hidden_act", "hidden_activation", "layer_types", "rope_local_base_freq")
    ropes = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    plain = {
        name: value for name, value in values.items() if name not in (*apart, *(ropes if rope is not None else ()))
    }
    base = decoder_config_from_hf(plain | (rope or {}) | {"model_type": "llama"}, source)
    try:
        config = parse_config(DecoderConfig, base.model_dump() | {"model_type": NATIVE} | changes, source)
    except ConfigError as error:
        raise InputError(str(error)) from None
    for kind in () if config.departures() else _PLAIN_TYPES:
        candidate = config.model_copy(update={"model_type": kind})
        try:
            decoder_config_to_hf(candidate)
        except InputError:
            continue
        return candidate
    return config


def _sliding(values: Values, source: str, pattern: Any) -> Values:
    """`layer_types` and `sliding_window` where every `pattern`-th layer sees all; 0: none does."""
    layers, window = _count(values, "num_hidden_layers", source), values.get("sliding_window")
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 0:
        raise InputError(f"{source}: sliding_window_pattern must be a whole number (got {pattern!r})")
    types = values.get("layer_types")
    if types is None:
        full = [pattern > 0 and (layer + 1) % pattern == 0 for layer in range(layers)]
        types = ["full_attention" if each or window is None else "sliding_attention" for each in full]
    known = ("sliding_attention", "full_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise InputError(f"{source}: layer_types must name sliding_attention or full_attention for {layers} layers")
    slides = "sliding_attention" in types
    return {"layer_types": types, "sliding_window": window if slides else None}


def _ropes(values: Values, source: str, main: float, local: float) -> tuple[Values, float]:
    """Rotary settings of full layers as Llama spells them, and the base of sliding layers."""
    rope = values.get("rope_parameters")
    rope = rope if isinstance(rope, dict) else {}
    if "full_attention" in rope or "sliding_attention" in rope:
        sections = [rope.get(name) or {} for name in ("full_attention", "sliding_attention")]
        if not all(isinstance(section, dict) for section in sections):
            raise InputError(f"{source}: rope_parameters must have rotary settings for each kind of layer")
        whole, near = (dict(section) for section in sections)
        if near.get("rope_type", "default") != "default":
            raise InputError(f"{source}: rotary scaling of sliding layers is not supported")
        whole.setdefault("rope_theta", values.get("rope_theta", main))
        theta = near.get("rope_theta", values.get("rope_local_base_freq", local))
        return {"rope_parameters": whole}, _number({"rope_theta": theta}, "rope_theta", source)
    theta = values.get("rope_theta", main)
    made = {"rope_theta": theta, "rope_scaling": values.get("rope_scaling"), "rope_parameters": rope or None}
    return made, _number({"rope_local_base_freq": local} | values, "rope_local_base_freq", source)


def _gemma3(values: Values, source: str) -> Fold:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        if values.get(name):
            raise InputError(f"{source}: {name}={values[name]!r} is not supported")
    rope, local = _ropes(values, source, 1e6, 1e4)
    sliding = _sliding(values, source, values.get("sliding_window_pattern", 6))
    kinds = ["local" if kind == "sliding_attention" else "main" for kind in sliding["layer_types"]]
    changes = {"norms": "around", "qk_norm": True, "activation": "gelu_tanh", "layer_rotary": kinds}
    config = _config(values, source, rope, **changes, **sliding, rope_local_theta=local)
    scale = _number(values, "query_pre_attn_scalar", source)
    return Fold(
        config,
        _AROUND,
        plus_one=True,
        embedding=config.hidden_size**0.5,
        final=config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0,
        query=(config.head_dim / scale) ** 0.5,
    )


def _granite(values: Values, source: str) -> Fold:
    config = _config(values, source)
    embedding = _number(values, "embedding_multiplier", source)
    return Fold(
        config,
        embedding=embedding,
        final=1 / (_number(values, "logits_scaling", source) * (embedding if config.tie_word_embeddings else 1.0)),
        query=_number(values, "attention_multiplier", source) * config.head_dim**0.5,
        residual=_number(values, "residual_multiplier", source),
    )


def _smollm3(values: Values, source: str) -> Fold:
    layers = _count(values, "num_hidden_layers", source)
    interval = _count(values, "no_rope_layer_interval", source)
    rotates = values.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers:
        raise InputError(f"{source}: no_rope_layers must have a number for each of {layers} layers")
    kinds = None if all(rotates) else ["main" if each else "none" for each in rotates]
    sliding: Values = {}
    if values.get("use_sliding_window") and values.get("sliding_window") is not None:
        types = ["full_attention" if each else "sliding_attention" for each in rotates]
        sliding = _sliding({"layer_types": types} | values, source, 0)
    return Fold(_config(values, source, layer_rotary=kinds, **sliding))


def _olmo2(values: Values, source: str) -> Fold:
    return Fold(_config(values, source, norms="after", qk_norm=True, qk_norm_over="all"), _AFTER)


def _olmo3(values: Values, source: str) -> Fold:
    theta = values.get("rope_theta", 10000.0)
    rope, local = _ropes(values, source, theta, theta)
    sliding = _sliding(values, source, 4)
    kinds = ["local" if kind == "sliding_attention" else "main" for kind in sliding["layer_types"]]
    changes = {"norms": "after", "qk_norm": True, "qk_norm_over": "all", "layer_rotary": kinds}
    return Fold(_config(values, source, rope, **changes, **sliding, rope_local_theta=local), _AFTER)


def _exaone4(values: Values, source: str) -> Fold:
    pattern = values.get("sliding_window_pattern", 4)
    layers = _count(values, "num_hidden_layers", source)
    if pattern == "":
        raise InputError(f"{source}: sliding_window_pattern is empty; it names kinds of layers, such as LLLG")
    if values.get("layer_types") is None and isinstance(pattern, str):
        types = [pattern[layer % len(pattern)] == "L" and layer < layers - 1 for layer in range(layers)]
        values = values | {"layer_types": ["sliding_attention" if near else "full_attention" for near in types]}
    sliding = _sliding(values, source, 0 if isinstance(pattern, str) else pattern)
    hybrid = values.get("sliding_window") is not None
    kinds = ["main" if kind == "sliding_attention" else "none" for kind in sliding["layer_types"]] if hybrid else None
    return Fold(_config(values, source, norms="after", qk_norm=True, layer_rotary=kinds, **sliding), _AFTER)


def _phi3(values: Values, source: str) -> Fold:
    window = {"sliding_window": values["sliding_window"]} if values.get("sliding_window") else {}
    config, rotary = _partial(values, source, **window)
    return Fold(config, fused=True, fused_mlp=True, rotary=rotary)


def _glm(values: Values, source: str) -> Fold:
    changes: Values = {"attention_bias": bool(values["attention_bias"]), "attention_output_bias": False}
    around = values["model_type"] == "glm4"
    config, rotary = _partial(values, source, **changes | ({"norms": "around"} if around else {}))
    names = _AROUND_GLM if around else {}
    return Fold(config, names, fused_mlp=True, rotary=rotary, interleaved=True)


def _interleaved(values: Values, source: str) -> Fold:
    changes: Values = {"attention_output_bias": False}
    if values["model_type"] == "ernie4_5":
        changes = dict.fromkeys(("attention_bias", "attention_output_bias", "mlp_bias"), bool(values.get("use_bias")))
    config = _config(values, source, **changes)
    return Fold(config, interleaved=True)


def _ministral(values: Values, source: str) -> Fold:
    return Fold(_config(values, source, **_sliding(values, source, 0)))


def _seed_oss(values: Values, source: str) -> Fold:
    return Fold(_config(values, source, attention_output_bias=bool(values.get("attention_out_bias"))))


def _partial(values: Values, source: str, **changes: Any) -> tuple[DecoderConfig, int]:
    """The network of which the first dimensions of a head rotate, and how many."""
    rope = {name: values[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in values}
    sections = [dict(rope[name]) for name in ("rope_scaling", "rope_parameters") if isinstance(rope.get(name), dict)]
    share = values.get("partial_rotary_factor", 1.0)
    for section in sections:
        share = section.pop("partial_rotary_factor", share)
    merged: Values = {"rope_theta": rope.get("rope_theta", 10000.0)}
    for section in sections:
        merged |= section
    plain = {name: value for name, value in values.items() if name not in rope}
    if merged.get("rope_type", merged.get("type")) == "longrope":
        merged = _within_original(merged, values, source)
        plain["max_position_embeddings"] = merged["original_max_position_embeddings"]
    whole = _config(plain, source, {"rope_parameters": {"rope_theta": merged["rope_theta"]}}, **changes)
    rotary = int(whole.head_dim * _number({"partial_rotary_factor": share}, "partial_rotary_factor", source))
    divisors = merged.get("short_factor")
    if isinstance(divisors, list) and len(divisors) != rotary // 2:
        raise InputError(f"{source}: short_factor has {len(divisors)} numbers for {rotary // 2} pairs of dimensions")
    if rotary == whole.head_dim:
        return _config(plain, source, {"rope_parameters": merged}, **changes), 0
    if rotary < 2 or rotary % 2 or rotary > whole.head_dim:
        raise InputError(f"{source}: partial_rotary_factor {share} of {whole.head_dim} dimensions is no even number")
    return _config(plain, source, {"rope_parameters": merged}, **changes, rotary_pairs=rotary // 2), rotary


def _within_original(rope: Values, values: Values, source: str) -> Values:
    """longrope's settings within the original context, where its frequencies do not depend on the length. Rotated
    queries and keys grow with the whole context all the same, as in transformers."""
    original = rope.get("original_max_position_embeddings", values.get("original_max_position_embeddings"))
    if isinstance(original, bool) or not isinstance(original, int) or original < 2:
        raise InputError(f"{source}: longrope needs original_max_position_embeddings, a context (got {original!r})")
    growth = _number(values, "max_position_embeddings", source) / original
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    short = rope.get("short_factor")
    made = {"rope_theta": rope["rope_theta"], "rope_type": "longrope", "short_factor": short, "long_factor": short}
    return made | {"original_max_position_embeddings": original, "attention_factor": attention}


def _number(values: Values, name: str, source: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _LARGEST:
        raise InputError(f"{source}: {name} must be a positive number (got {value!r})")
    return float(value)


def _count(values: Values, name: str, source: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 10_000:
        raise InputError(f"{source}: {name} must be a positive whole number (got {value!r})")
    return value


_LARGEST = 1e18  # of a factor: its square is still a float32, and an integer of hundreds of digits is none
# What transformers assumes when a config.json leaves the field out.
_FAMILIES: dict[str, _Family] = {
    "gemma3_text": _Family(
        _gemma3,
        {
            "head_dim": 256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        "gelu_pytorch_tanh",
    ),
    "granite": _Family(
        _granite,
        {
            "max_position_embeddings": 2048,
            **dict.fromkeys(
                ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
            ),
        },
    ),
    "smollm3": _Family(
        _smollm3,
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": _Family(_olmo2, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "olmo3": _Family(_olmo3, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096}),
    "phi3": _Family(_phi3, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "exaone4": _Family(_exaone4, {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "num_key_value_heads": 32}),
    "glm": _Family(
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
    "glm4": _Family(
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
    "helium": _Family(
        _interleaved,
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128},
    ),
    "ernie4_5": _Family(
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
    "ministral": _Family(
        _ministral, {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
    ),
    "seed_oss": _Family(
        _seed_oss,
        {"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    ),
}
