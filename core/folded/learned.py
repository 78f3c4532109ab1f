"""Older families: tokens get a vector by their position (GPT-2, GPT-Neo, OPT, the first StarCoder), and GPT-J, which
names its parts like these and rotates."""

from __future__ import annotations

from dataclasses import replace

from penjing.core.errors import InputError
from penjing.core.folded.centred import GELUS, TANH_FIRST, centred
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of, partial_of

_LAYERS = "transformer.h."
_OUTSIDE = {
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
}
_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
_FUSED = {
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.gate_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_MASKS = (".attn.bias", ".attn.masked_bias")  # which tokens a query sees, as older checkpoints store it
_GPT: Values = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256}
_ACTIVATIONS: Values = GELUS | {"relu": "relu"}


def _gpt2(values: Values, source: str) -> Fold:
    _usual(values, source, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return _learned(
        values,
        source,
        _FUSED,
        transposed=tuple(_FUSED.values()),
        fused=True,
        unused=_MASKS,
    )


def _gpt_bigcode(values: Values, source: str) -> Fold:
    _usual(values, source, scale_attn_weights=True, add_cross_attention=False)
    shared = flag_of(values, "multi_query", source)
    return _learned(
        values,
        source,
        _FUSED,
        fused=True,
        fused_heads=not shared,
        changes={"num_key_value_heads": 1} if shared else {},
        unused=_MASKS,
    )


def _gpt_neo(values: Values, source: str) -> Fold:
    layers = count_of(values, "num_layers", source)
    kinds = {"global": "full_attention", "local": "sliding_attention"}
    types: list[str] = []
    try:
        for pattern, count in values["attention_types"]:
            types += [kinds[each] for each in pattern] * min(count, layers + 1)
    except (KeyError, TypeError, ValueError):
        raise InputError(f"{source}: attention_types must say global or local, and how often") from None
    if len(types) != layers:
        raise InputError(f"{source}: attention_types names {len(types)} layers, num_layers is {layers}")
    sliding = {"layer_types": types, "sliding_window": count_of(values, "window_size", source)}
    fold = _learned(
        values,
        source,
        {f"self_attn.{name}_proj": f"attn.attention.{name}_proj" for name in "qkv"}
        | {"self_attn.o_proj": "attn.attention.out_proj", "mlp.gate_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
        stored=("norm", "shift", "out", "mlp"),
        changes=sliding if "sliding_attention" in types else {},
        unused=(".attn.attention.bias", ".attn.attention.masked_bias"),
    )
    # Its scores are not divided by the root of the size of a head.
    return replace(fold, query=fold.config.head_dim**0.5)


def _opt(values: Values, source: str) -> Fold:
    _usual(
        values, source, do_layer_norm_before=True, _remove_final_layer_norm=False, layer_norm_elementwise_affine=True
    )
    if (width := values.get("word_embed_proj_dim")) not in (None, values.get("hidden_size")):
        raise InputError(f"{source}: word_embed_proj_dim={width!r} is not supported")
    stored = ("norm", "shift", *(("qkv", "out", "mlp") if flag_of(values, "enable_bias", source) else ()))
    outside = {f"model.{name}": f"model.decoder.{name}" for name in ("embed_tokens", "embed_positions")}
    return _learned(
        values | {"layer_norm_epsilon": 1e-5},
        source,
        {"self_attn.o_proj": "self_attn.out_proj", "mlp.gate_proj": "fc1", "mlp.down_proj": "fc2"}
        | {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"},
        stored=stored,
        layers="model.decoder.layers.",
        outside=outside | {"model.norm": "model.decoder.final_layer_norm"},
        first_position=2,
    )


def _gptj(values: Values, source: str) -> Fold:
    named = _spelled(values, source)
    changes, how = centred(named, source, "norm", "shift", "mlp", "head")
    size = max(named["hidden_size"] // named["num_attention_heads"], 1)
    rotary = size if values["rotary_dim"] is None else count_of(values, "rotary_dim", source)
    rope: Values = {"partial_rotary_factor": rotary / size}
    config, rotary = partial_of(named | rope, source, **changes, **_gateless(named), parallel=True)
    names = {f"self_attn.{name}_proj": f"attn.{name}_proj" for name in "qkv"} | {
        "self_attn.o_proj": "attn.out_proj",
        "mlp.gate_proj": "mlp.fc_in",
        "mlp.down_proj": "mlp.fc_out",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_1",
    }
    outside = {name: _OUTSIDE[name] for name in ("model.embed_tokens", "model.norm")}
    return Fold(config, names, outside, _LAYERS, rotary=rotary, interleaved=True, unused=_MASKS, **how)


def _learned(
    values: Values,
    source: str,
    names: dict[str, str],
    *,
    stored: tuple[str, ...] = ("norm", "shift", "qkv", "out", "mlp"),
    changes: Values | None = None,
    layers: str = _LAYERS,
    outside: dict[str, str] = _OUTSIDE,
    **how: object,
) -> Fold:
    """A network of the field names of GPT-2 or of Llama whose positions are a table."""
    named = _spelled(values, source)
    fields, kept = centred(named, source, *stored)
    positions: Values = {"learned_positions": True, "layer_rotary": ["none"] * named["num_hidden_layers"]}
    config = config_of(named, source, {}, **fields, **_gateless(named), **positions, **(changes or {}))
    return Fold(config, _NORMS | names, outside, layers, **kept, **how)  # pyright: ignore[reportArgumentType]


_SPELLED = {
    "hidden_size": ("n_embd", "hidden_size"),
    "num_hidden_layers": ("n_layer", "num_layers", "num_hidden_layers"),
    "num_attention_heads": ("n_head", "num_heads", "num_attention_heads"),
    "max_position_embeddings": ("n_positions", "max_position_embeddings"),
}
_INNER = {"gpt_neo": "intermediate_size", "opt": "ffn_dim"}  # of the others n_inner


def _spelled(values: Values, source: str) -> Values:
    """`values` under the names of Llama, without what these families do not know."""
    found = {ours: next((values[name] for name in names if name in values), None) for ours, names in _SPELLED.items()}
    found["intermediate_size"] = values.get(_INNER.get(values["model_type"], "n_inner"))
    if found["intermediate_size"] is None and isinstance(found["hidden_size"], int):
        found["intermediate_size"] = 4 * found["hidden_size"]
    apart = ("num_key_value_heads", "head_dim", "sliding_window", "attention_bias", "mlp_bias")
    named = {name: value for name, value in values.items() if name not in apart} | found
    named["rms_norm_eps"] = values["layer_norm_epsilon"]
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        count_of(named, name, source, most=1_000_000)
    return named


def _gateless(values: Values) -> Values:
    return {"mlp_gated": False, "activation": _ACTIVATIONS[values["hidden_act"]]}


def _usual(values: Values, source: str, **usual: bool) -> None:
    for name, value in usual.items():
        if values.get(name, value) != value:
            raise InputError(f"{source}: {name}={values[name]!r} is not supported")


LEARNED: dict[str, Family] = {
    "gpt2": Family(_gpt2, _GPT | {"n_positions": 1024}, TANH_FIRST),
    "gpt_bigcode": Family(
        _gpt_bigcode, _GPT | {"n_positions": 1024, "multi_query": True}, ("gelu_pytorch_tanh", "gelu_new", "gelu")
    ),
    "gpt_neo": Family(
        _gpt_neo,
        _GPT
        | {
            "max_position_embeddings": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "window_size": 256,
            "attention_types": [[["global", "local"], 12]],
        },
        TANH_FIRST,
    ),
    "opt": Family(
        _opt,
        {
            "max_position_embeddings": 2048,
            "enable_bias": True,
            "tie_word_embeddings": True,
            "bos_token_id": 2,
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
        ("relu", "gelu", "gelu_new"),
    ),
    "gptj": Family(_gptj, _GPT | {"n_positions": 2048, "rotary_dim": 64, "tie_word_embeddings": False}, TANH_FIRST),
}
"""By `model_type`: what transformers assumes when a config.json leaves a field out, and how the rest is read."""
