"""Gemma and its kin: embeddings grow with the width, norms multiply by 1 + w, the MLP's gate is a GELU.

In Gemma 4 norms multiply by w, and values pass one, too. Layers that see all have larger and fewer heads, whose values
may be their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.errors import InputError
from penjing.core.folded.fold import (
    Family,
    Fold,
    LayerHeads,
    Values,
    config_of,
    count_of,
    flag_of,
    number_of,
    ropes_of,
    sliding_of,
    whole_of,
)
from penjing.core.models.config import DecoderConfig

_AROUND = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_AROUND_4 = _AROUND | {"layer_scale": "layer_scalar"}
_BEFORE = {"post_attention_layernorm": "pre_feedforward_layernorm"}
_LAST = "full_attention"  # of the last layer, whatever the file says
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_MIXED = {f"mlp.shared_experts.{part}_proj": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_MIXED |= {f"mlp.experts.*.{part}_proj": f"experts.*.{part}_proj" for part in ("gate", "up", "down")}
_MIXED |= {
    "post_attention_layernorm": "pre_feedforward_layernorm_2",
    "mlp.gate": "router.proj",
    "mlp.shared_output_norm": "post_feedforward_layernorm_1",
    "mlp.experts_output_norm": "post_feedforward_layernorm_2",
}
_INPUTS = {
    "mlp.gate": "router.scale",
    "mlp.shared_experts.gate_proj": "pre_feedforward_layernorm.weight",
    "mlp.shared_experts.up_proj": "pre_feedforward_layernorm.weight",
    "mlp.experts.*.gate_proj": "pre_feedforward_layernorm_2.weight",
    "mlp.experts.*.up_proj": "pre_feedforward_layernorm_2.weight",
}
_MIXING: dict[str, Any] = {
    "reads": _INPUTS,
    "main_reader": "mlp.experts.*.gate_proj",
    "gains": {"mlp.experts.*.down_proj": "router.per_expert_scale"},
    "unused": (".router.scale", ".router.per_expert_scale", ".pre_feedforward_layernorm.weight"),
}
_OF_TOKENS = {
    "token.gate_proj": "per_layer_input_gate",
    "token.out_proj": "per_layer_projection",
    "token.norm": "post_per_layer_input_norm",
}
_TOKEN_TABLE = {"model.embed_inputs": "model.embed_tokens_per_layer"}
_PROJECTED = ("per_layer_model_projection", "per_layer_projection_norm")
_MADE_TABLE = tuple(f".{name}.weight" for name in _PROJECTED)
_ROWS = 4096  # of the vocabulary at a time
_GELU = "gelu_pytorch_tanh"
_LARGEST = 1_000_000  # of a width
_MOST = 65_536  # dimensions of a head


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


def _gemma4(values: Values, source: str) -> Fold:
    """Heads of one size are needed: smaller ones get zeros, and fewer heads of keys are repeated."""
    if values.get("use_bidirectional_attention") not in (None, "vision"):  # of text alone "vision" says nothing
        raise InputError(
            f"{source}: use_bidirectional_attention={values['use_bidirectional_attention']!r} is not supported"
        )
    layers = count_of(values, "num_hidden_layers", source)
    types = values.get("layer_types")
    if isinstance(types, list) and types:
        values = values | {"layer_types": [*types[:-1], _LAST]}
    elif types is None:
        pattern = ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(layers)]
        values = values | {"layer_types": [*pattern[:-1], _LAST]}
    sliding = sliding_of(values, source, 0)
    heads = _heads(values, source, sliding["layer_types"])
    size, keys = max(each.size for each in heads), max(each.keys for each in heads)
    if any(keys % each.keys for each in heads):
        raise InputError(f"{source}: num_key_value_heads of the layers do not divide {keys}, the most of a layer")
    rope, changes = _rotary(values, source, sliding["layer_types"], heads, size)
    changes |= {"norms": "around", "qk_norm": True, "value_norm": True, "layer_scales": True, "activation": "gelu_tanh"}
    if values.get("final_logit_softcapping") is not None:
        changes["logit_cap"] = number_of(values, "final_logit_softcapping", source)
    one = {"head_dim": size, "num_key_value_heads": keys}
    names, more = _AROUND_4, dict[str, Any]()
    if values.get("enable_moe_block"):
        del changes["activation"]
        changes["moe"], names, more = _experts(values, source), _AROUND_4 | _MIXED, _MIXING
        more = more | {"router": count_of(values, "hidden_size", source, most=_MOST) ** -0.5}
    shared = whole_of(values, "num_kv_shared_layers", source)
    if shared and flag_of(values, "use_double_wide_mlp", source):
        inner = count_of(values, "intermediate_size", source, most=_LARGEST)
        one["intermediate_size"] = 2 * inner
        changes["intermediate_sizes"] = [inner * (1 + (layer >= layers - shared)) for layer in range(layers)]
    if width := whole_of(values, "hidden_size_per_layer_input", source):
        if values["vocab_size_per_layer_input"] != values["vocab_size"]:
            rows = values["vocab_size_per_layer_input"]
            raise InputError(f"{source}: vocab_size_per_layer_input={rows!r} is not supported; vocab_size is")
        names, more = names | _OF_TOKENS, more | {"outside": dict(_TOKEN_TABLE), "unused": _MADE_TABLE}
    changes |= {"token_inputs": width, "shared_keys": shared}
    config = config_of(values | one, source, rope, **changes, **sliding)
    return Fold(
        config,
        names,
        **more,
        embedding=config.hidden_size**0.5,
        final=config.hidden_size**-0.5 if config.tie_word_embeddings else 1.0,
        query=size**0.5,
        layer_heads=heads,
        plain_values=True,
    )


def token_table(stored: Callable[[str], Tensor], begin: str, config: DecoderConfig) -> Tensor:
    """(vocab × layers, width) float32: what each layer takes of each token. There it is a row of a table beside a
    normed projection of the token's embedding, which follows from the token alone.

    Args:
        begin: what the names of its tensors begin with.
    """
    layers, width = config.num_hidden_layers, config.token_inputs
    rows_VP, embedding_VE = (stored(f"{begin}embed_tokens{end}.weight") for end in ("_per_layer", ""))
    matrix_PE, norm_P = (stored(f"{begin}{name}.weight").float() for name in _PROJECTED)
    made_VP = torch.empty(rows_VP.shape, dtype=torch.float32)
    for made_RP, rows_RP, embedding_RE in zip(
        *(each.split(_ROWS) for each in (made_VP, rows_VP, embedding_VE)), strict=True
    ):
        # The embedding grows by the root of the width, by which what is projected is divided.
        projected = (embedding_RE.float() @ matrix_PE.t()).unflatten(1, (layers, width))
        normed = F.rms_norm(projected, (width,), norm_P, config.rms_norm_eps)
        made_RP.copy_((normed.flatten(1) + rows_RP.float() * width**0.5) * 0.5**0.5)
    return made_VP.view(-1, width)


def _experts(values: Values, source: str) -> Values:
    """Experts stand beside an MLP that all tokens take."""
    return {
        "num_experts": count_of(values, "num_experts", source),
        "num_experts_per_tok": count_of(values, "top_k_experts", source),
        "moe_intermediate_size": count_of(values, "moe_intermediate_size", source, most=_LARGEST),
        "shared_expert_intermediate_size": count_of(values, "intermediate_size", source, most=_LARGEST),
        "activation": "gelu_tanh",
        "output_norms": True,
    }


def _heads(values: Values, source: str, types: list[str]) -> tuple[LayerHeads, ...]:
    """How each layer's heads are stored: by fields of those that see all, or as transformers writes it."""
    alike = flag_of(values, "attention_k_eq_v", source)
    own = values.get("per_layer_config")
    if own is None:
        larger: Values = {"head_dim": values["global_head_dim"]}
        if alike and values.get("num_global_key_value_heads") is not None:
            larger["num_key_value_heads"] = values["num_global_key_value_heads"]
        own = {str(layer): larger for layer, kind in enumerate(types) if kind == "full_attention"}
    if not isinstance(own, dict) or not all(isinstance(each, dict) for each in own.values()):
        raise InputError(f"{source}: per_layer_config must have settings by numbers of layers")
    if odd := sorted({name for each in own.values() for name in each} - {"head_dim", "num_key_value_heads"}):
        raise InputError(f"{source}: {odd[0]} in per_layer_config is not supported")
    found: list[LayerHeads] = []
    for layer, kind in enumerate(types):
        mine = values | (own.get(str(layer)) or {})
        size = count_of(mine, "head_dim", source, most=_MOST)
        if size % 2:
            raise InputError(f"{source}: head_dim={size} must be even for the rotary embedding")
        keys = count_of(mine, "num_key_value_heads", source)
        found.append(LayerHeads(size, keys, values_are_keys=alike and kind == "full_attention"))
    return tuple(found)


def _rotary(
    values: Values, source: str, types: list[str], heads: tuple[LayerHeads, ...], size: int
) -> tuple[Values, Values]:
    """Rotary settings of layers that see all as Llama spells them, and what else follows.

    "Proportional" ones are those of a whole head, of which the last stand still: with a smaller base they are those of
    as many pairs as rotate.
    """
    sections = values.get("rope_parameters") or _ROPES
    if not isinstance(sections, dict) or not all(isinstance(sections.get(kind), dict) for kind in types):
        raise InputError(f"{source}: rope_parameters must have rotary settings for each kind of layer")
    own = {kind: [each.size for each, other in zip(heads, types, strict=True) if other == kind] for kind in set(types)}
    if any(len(set(sizes)) > 1 for sizes in own.values()):
        raise InputError(f"{source}: head_dim differs among layers of one kind, which is not supported")
    near = sections["sliding_attention"] if "sliding_attention" in types else {"rope_theta": 1e4}
    if near.get("rope_type", "default") != "default":
        raise InputError(f"{source}: rotary scaling of sliding layers is not supported")
    whole, mine = sections["full_attention"], own["full_attention"][0]
    kind = whole.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        raise InputError(f"{source}: rotary scaling {kind!r} is not supported; proportional and default are")
    share = number_of({"partial_rotary_factor": 1.0} | whole, "partial_rotary_factor", source)
    pairs = int(share * mine // 2) if kind == "proportional" else mine // 2
    if not 0 < pairs <= mine // 2:
        raise InputError(f"{source}: partial_rotary_factor {share:g} of {mine} dimensions leaves no pair to rotate")
    theta = number_of(whole, "rope_theta", source) ** (2 * pairs / mine)
    rope: Values = {"rope_theta": theta}
    if kind == "proportional" and whole.get("factor", 1.0) != 1.0:
        factor = number_of(whole, "factor", source)
        rope = {"rope_parameters": {"rope_type": "linear", "factor": factor, "rope_theta": theta}}
    changes: dict[str, Any] = {"rotary_pairs": pairs if pairs < size // 2 else None}
    if "sliding_attention" in types:
        changes["layer_rotary"] = ["local" if kind == "sliding_attention" else "main" for kind in types]
        changes["rope_local_theta"] = number_of(near, "rope_theta", source)
        local = own["sliding_attention"][0] // 2
        changes["rotary_local_pairs"] = local if local != (changes["rotary_pairs"] or size // 2) else None
    return rope, changes


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
_GEMMA4: Values = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
}
_UNIFIED = _GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0}
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
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
        },
        ("gelu_pytorch_tanh",),
    ),
    "gemma4_text": Family(_gemma4, _GEMMA4, (_GELU,)),
    "gemma4_unified_text": Family(_gemma4, _UNIFIED, (_GELU,)),
}
