"""Falcon 7B, 40B and 11B: attention and MLP run beside each other, behind one norm or two, which subtract the mean."""

from __future__ import annotations

from penjing.core.errors import InputError
from penjing.core.folded.centred import GELUS, ONE_NORM, centred, refuse, with_eps
from penjing.core.folded.fold import Family, Fold, Values, config_of, count_of, flag_of

_NAMES = {
    "self_attn.qkv_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
_TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}


def _falcon(values: Values, source: str) -> Fold:
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
        _NAMES | (_TWO_NORMS if norms == 2 else ONE_NORM if parallel else {}),
        {"model.embed_tokens": "transformer.word_embeddings", "model.norm": "transformer.ln_f"},
        "transformer.h.",
        fused=True,
        fused_heads=True,
        **how,
    )


# What transformers assumes when a config.json leaves the field out.
FALCON: dict[str, Family] = {
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
    )
}
