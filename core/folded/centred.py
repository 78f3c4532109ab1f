"""Families whose norms subtract the mean of a token's channels.

What is added to the residual stream is centred where it is written, in the embedding and in the linear layers that
write: then the mean is 0 and LayerNorm is RMSNorm, exactly (so begins SliceGPT, https://arxiv.org/abs/2401.15024).
What a norm adds goes through the linear layers that read it and becomes their bias. A head that is tied to the
embedding keeps rows that are not centred, and is a matrix of its own from then on, unless the last norm has no weight.
"""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of, partial_of

GELUS = {"gelu": "gelu"} | dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
TANH_FIRST = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu")
ONE_NORM = {"post_attention_layernorm": "input_layernorm"}
_FALCON_NAMES = {
    "self_attn.qkv_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_FALCON_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def _starcoder2(values: Values, source: str) -> Fold:
    bias = ("qkv", "out", "mlp") if flag_of(values, "use_bias", source) else ()
    changes, how = centred(values, source, "norm", "shift", *bias)
    changes["sliding_window"] = values.get("sliding_window")
    names = {"mlp.gate_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}
    return Fold(config_of(with_eps(values, "norm_epsilon"), source, **changes, **_gateless(values)), names, **how)


def _phi(values: Values, source: str) -> Fold:
    refuse(values, source, "qk_layernorm")
    changes, how = centred(values, source, "norm", "shift", "qkv", "out", "mlp", "head")
    config, rotary = partial_of(
        with_eps(values, "layer_norm_eps"), source, **changes, **_gateless(values), parallel=True
    )
    names = {"self_attn.o_proj": "self_attn.dense", "mlp.gate_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    return Fold(config, names | ONE_NORM, {"model.norm": "model.final_layernorm"}, rotary=rotary, **how)


def _gpt_neox(values: Values, source: str) -> Fold:
    bias = ("qkv", "out") if flag_of(values, "attention_bias", source) else ()
    changes, how = centred(values, source, "norm", "shift", "mlp", *bias)
    named = with_eps(values, "layer_norm_eps")
    for theirs, ours in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        if theirs in values:
            named[ours] = values[theirs]
    parallel = flag_of(values, "use_parallel_residual", source)
    config, rotary = partial_of(named, source, **changes, **_gateless(values), parallel=parallel)
    return Fold(
        config,
        {
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.gate_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        {"model.embed_tokens": "gpt_neox.embed_in", "model.norm": "gpt_neox.final_layer_norm", "lm_head": "embed_out"},
        "gpt_neox.layers.",
        fused=True,
        fused_heads=True,
        rotary=rotary,
        unused=(".attention.bias", ".attention.masked_bias"),
        **how,
    )


def _stablelm(values: Values, source: str) -> Fold:
    refuse(values, source, "qk_layernorm")
    bias = ("qkv",) if flag_of(values, "use_qkv_bias", source) else ()
    parallel = flag_of(values, "use_parallel_residual", source)
    changes, how = centred(values, source, "norm", "shift", *bias)
    config, rotary = partial_of(with_eps(values, "layer_norm_eps"), source, **changes, parallel=parallel)
    return Fold(config, ONE_NORM if parallel else {}, rotary=rotary, **how)


def _nemotron(values: Values, source: str) -> Fold:
    bias = ("qkv", "out") if flag_of(values, "attention_bias", source) else ()
    bias += ("mlp",) if flag_of(values, "mlp_bias", source) else ()
    changes, how = centred(values, source, "norm", "shift", *bias)
    gateless: Values = {"mlp_gated": False, "activation": "relu2"}
    config, rotary = partial_of(with_eps(values, "norm_eps"), source, **changes, **gateless)
    return Fold(config, {"mlp.gate_proj": "mlp.up_proj"}, plus_one=True, rotary=rotary, **how)


def _jais2(values: Values, source: str) -> Fold:
    bias = ("qkv", "out") if flag_of(values, "attention_bias", source) else ()
    bias += ("mlp",) if flag_of(values, "mlp_bias", source) else ()
    changes, how = centred(values, source, "norm", "shift", *bias)
    config = config_of(with_eps(values, "layer_norm_eps"), source, **changes, mlp_gated=False, activation="relu2")
    return Fold(config, {"mlp.gate_proj": "mlp.up_proj"}, **how)


def _olmo(values: Values, source: str) -> Fold:
    refuse(values, source, "clip_qkv")
    bias = ("qkv", "out") if flag_of(values, "attention_bias", source) else ()
    tied = flag_of(values, "tie_word_embeddings", source)
    changes, how = centred(values | {"tie_word_embeddings": False}, source, *bias)
    changes["tie_word_embeddings"] = tied
    config = config_of(values | {"rms_norm_eps": 1e-5}, source, **changes)
    return Fold(config, **how)


def _falcon(values: Values, source: str) -> Fold:
    """Attention and MLP run beside each other, behind one norm or two."""
    refuse(values, source, "alibi")
    newer, parallel = flag_of(values, "new_decoder_architecture", source), flag_of(values, "parallel_attn", source)
    norms = values.get("num_ln_in_parallel_attn", 2 if newer else 1)
    if norms not in ((1, 2) if newer and parallel else (1,)) or (newer and not parallel):
        raise InputError(
            f"{source}: num_ln_in_parallel_attn={norms!r} with parallel_attn={parallel} and "
            f"new_decoder_architecture={newer} is not supported"
        )
    heads = count_of(values, "num_attention_heads", source, most=1_000_000)
    width = count_of(values, "hidden_size", source, most=1_000_000)
    shared = not newer and flag_of(values, "multi_query", source)
    sizes = {
        "num_key_value_heads": 1 if shared else values.get("num_kv_heads", heads),
        "intermediate_size": values.get("ffn_hidden_size", 4 * width),
        "head_dim": max(width // heads, 1),
    }
    bias = ("qkv", "out", "mlp") if flag_of(values, "bias", source) else ()
    changes, how = centred(values, source, "norm", "shift", *bias)
    changes |= {"parallel": parallel, "mlp_gated": False, "activation": GELUS[values["hidden_act"]]}
    config = config_of(with_eps(values, "layer_norm_epsilon") | sizes, source, **changes)
    return Fold(
        config,
        _FALCON_NAMES | (_FALCON_NORMS if norms == 2 else ONE_NORM if parallel else {}),
        {"model.embed_tokens": "transformer.word_embeddings", "model.norm": "transformer.ln_f"},
        "transformer.h.",
        fused=True,
        fused_heads=True,
        **how,
    )


def centred(values: Values, source: str, *stored: str) -> tuple[Values, Values]:
    """Fields of the network, and of its `Fold`, where the folder holds what `stored` names."""
    shift, tied = "shift" in stored, flag_of(values, "tie_word_embeddings", source)
    changes = {
        "attention_bias": shift or "qkv" in stored,
        "attention_output_bias": "out" in stored,
        "mlp_bias": shift or "mlp" in stored,
        "head_bias": shift or "head" in stored,
        "tie_word_embeddings": False,
    }
    return changes, {"centred": True, "stored": frozenset(stored), "tied": tied}


def _gateless(values: Values) -> Values:
    return {"mlp_gated": False, "activation": GELUS[values["hidden_act"]]}


def with_eps(values: Values, eps: str) -> Values:
    """`values` with what the norms add to the variance under our name."""
    return values | {"rms_norm_eps": values[eps]}


def refuse(values: Values, source: str, *names: str) -> None:
    """Raise InputError if one of `names` is set."""
    for name in names:
        if values.get(name):
            raise InputError(f"{source}: {name}={values[name]!r} is not supported")


# What transformers assumes when a config.json leaves the field out.
CENTRED: dict[str, Family] = {
    "starcoder2": Family(
        _starcoder2,
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu"),
    ),
    "phi": Family(
        _phi,
        {
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "tie_word_embeddings": False,
        },
        TANH_FIRST,
    ),
    "gpt_neox": Family(
        _gpt_neox,
        {
            "max_position_embeddings": 2048,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    ),
    "stablelm": Family(
        _stablelm,
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "tie_word_embeddings": False,
        },
    ),
    "nemotron": Family(
        _nemotron,
        {
            "max_position_embeddings": 4096,
            "norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        ("relu2",),
    ),
    "jais2": Family(
        _jais2,
        {
            "max_position_embeddings": 8192,
            "layer_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        ("relu2",),
    ),
    "olmo": Family(_olmo, {"max_position_embeddings": 2048, "attention_bias": False, "tie_word_embeddings": False}),
    "falcon": Family(
        _falcon,
        {
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "multi_query": True,
            "bias": False,
            "tie_word_embeddings": True,
        },
        tuple(GELUS),
        aliases={"n_embed": "hidden_size"},
    ),
}
