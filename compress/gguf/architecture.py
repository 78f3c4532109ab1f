"""Which GGUF architecture computes a network, what its file says, and where each tensor goes.

An architecture computes a network where the importer (`core.gguf.network`) reads that network back from the metadata
and the names that a file of it would have: one table serves both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penjing.compress.gguf.same import differences, needs_window
from penjing.core.errors import InputError
from penjing.core.folded.fold import Fold
from penjing.core.folded.placement import Placement
from penjing.core.gguf.architecture import Architecture
from penjing.core.gguf.names import (
    LLAMA3_FIELDS,
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    YARN_FIELDS,
    tensor_of,
)
from penjing.core.gguf.network import EMBEDDING, GgufNetwork, fold_of
from penjing.core.gguf.table import ARCHITECTURES
from penjing.core.layers.settings import MoEConfig, RopeScaling
from penjing.core.models.config import DecoderConfig
from penjing.core.models.hf_config import NATIVE
from penjing.core.models.rope import inverse_frequencies, yarn_magnitudes
from penjing.core.models.tensor_names import tensor_shapes

_KINDS = {"mistral": "llama", "mixtral": "llama"}  # model_type → the kind of an architecture
_BIASES = {
    "qkv": "attention_bias",
    "out": "attention_output_bias",
    "mlp": "mlp_bias",
    "head": "head_bias",
}


@dataclass(frozen=True)
class Written:
    """How a network is written.

    Attributes:
        fields: metadata of the architecture under its names in the file; numbers, texts or lists.
        divisors: name in the file → (pairs,) divisors of the rotary frequencies, where the scaling is written as such.
        fold: how the file holds the network, with zeros for the biases that it must have besides.
    """

    architecture: Architecture
    fields: dict[str, Any]
    divisors: dict[str, NDArray[np.float32]]
    fold: Fold


def written_as(config: DecoderConfig, source: str) -> list[Written]:
    """How `config` may be written, in its first `context_length` tokens, the best first: where it has its type's own
    architecture that one, then as the table goes.

    Raises:
        InputError: no architecture computes it, and what the nearest has otherwise; `source` names the artifact.
    """
    kind = _KINDS.get(config.model_type, config.model_type)
    able = [each for each in ARCHITECTURES.values() if (each.dense if config.moe is None else each.experts is not None)]
    known = sorted(able, key=lambda each: kind == NATIVE or each.kind != kind)  # keeps the order of the table
    fitting: list[Written] = []
    refused: list[tuple[str, list[str]]] = []
    for here in known:
        written = _as(here, config)
        if found := _departures(written, config):
            refused.append((here.name, found))
            continue
        fitting.append(written)
        if not here.layer_norm:  # of one with such norms only the tensors tell whether all have a place
            break
    if fitting:
        return fitting
    name, found = min(refused, key=lambda each: len(each[1]))
    raise InputError(
        f"{source} has {' and '.join(found)}, which {name} has not, the nearest architecture of GGUF, and so it is not "
        "written as GGUF; penjing serves the artifact as it is"
    )


def context_length(config: DecoderConfig, here: Architecture) -> int:
    """Tokens in which the file computes the network: where llama.cpp knows no windows no more than the smallest one,
    within which a sliding layer sees everything."""
    if needs_window(here):
        return config.max_position_embeddings
    windows = (config.layer_window(layer) for layer in range(config.num_hidden_layers))
    return min([config.max_position_embeddings, *(window for window in windows if window is not None)])


def _departures(written: Written, config: DecoderConfig) -> list[str]:
    """In what a file of this architecture would be another network, as NAME=VALUE."""
    here, fold, name = written.architecture, written.fold, written.architecture.name
    found: list[str] = []
    if here.square and config.num_attention_heads * config.head_dim != config.hidden_size:
        found.append(f"head_dim={config.head_dim}, whose heads are not as wide as the stream together")
    if here.ungrouped and config.num_key_value_heads != config.num_attention_heads:
        found.append(f"num_key_value_heads={config.num_key_value_heads}")
    if here.tied is not None and here.tied != (fold.config.tie_word_embeddings or fold.tied):
        found.append(f"tie_word_embeddings={config.tie_word_embeddings}")
    if (scaling := config.rope_scaling).rope_type not in here.scalings | {"dynamic"}:
        found.append(f"rotary scaling {scaling.rope_type!r}")
    if config.rotary_pairs is not None and not here.partial:
        found.append(f"rotary_pairs={config.rotary_pairs}")
    if config.learned_positions and context_length(config, here) < config.max_position_embeddings:
        found.append(f"sliding_window={config.sliding_window}")
    if "shift" not in here.stored:
        biases = {field for part, field in _BIASES.items() if getattr(config, field) and part not in here.biases}
        found += [f"{field}=True" for field in sorted(biases)]
    shape = SimpleNamespace(shape=(config.hidden_size, config.vocab_size))
    tensors: dict[str, Any] = {tensor_of(each)[0]: shape for each in stored_names(written)}
    tensors |= {each: SimpleNamespace(data=data) for each, data in written.divisors.items()}
    try:
        read = GgufNetwork(Path(name), {"general.architecture": name, **written.fields}, tensors)
    except InputError as error:
        return found or [str(error).removeprefix(f"{name}: ")]
    return found + differences(config, fold.config, read.config)


def stored_names(written: Written) -> dict[str, list[str]]:
    """Name in the file → our names of the tensors that are there."""
    placement, found = Placement(written.fold), dict[str, list[str]]()
    for name in tensor_shapes(written.fold.config):
        if placement.holds(name):
            found.setdefault(placement.place(name)[0], []).append(name)
    if "shift" in written.fold.stored:
        for name in [name for name in tensor_shapes(written.fold.config) if name.endswith("norm.weight")]:
            shift = f"{name.removesuffix('.weight')}.bias"
            found.setdefault(placement.place(shift)[0], []).append(shift)
    assert EMBEDDING in found
    return found


def _as(here: Architecture, config: DecoderConfig) -> Written:
    """`config` as a network of that architecture, whether it is one or not."""
    shift = {"qkv", "mlp", "head"} if "shift" in here.stored else set[str]()
    wider: dict[str, Any] = {
        field: False for part, field in _BIASES.items() if part not in here.biases
    }  # `_departures` tells of them
    wider |= {_BIASES[part]: True for part in (*here.needed, *shift)}
    if config.rope_scaling.rope_type not in here.scalings:
        wider["rope_scaling"] = RopeScaling()
    if not here.partial:
        wider["rotary_pairs"] = None
    whole = config.model_copy(update=wider)
    there = {part for part, field in _BIASES.items() if getattr(whole, field) and part in here.biases}
    tied = here.layer_norm and here.tied is True
    fold = fold_of(here, whole, biases=there, fused=here.fused, tied=tied)
    values = _sizes(whole, here) | _windows(whole, here) | _scaling(whole.rope_scaling)
    caps = {name: getattr(whole, field) for name, (field, _) in here.caps.items()}
    values |= {name: float(cap) for name, cap in caps.items() if cap is not None}
    values |= {name: bool(getattr(whole, field)) for name, (field, _) in here.flags.items()}
    if here.factors != "none":
        values["logit_scale"] = 1.0
    if here.convolves and whole.conv_taps:
        values["shortconv.l_cache"] = whole.conv_taps
    fields = {"general.quantization_version": 2, **{f"{here.name}.{name}": value for name, value in values.items()}}
    return Written(here, fields, _divisors(whole), fold)


def _sizes(config: DecoderConfig, here: Architecture) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    key_heads: Any = config.num_key_value_heads
    if here.convolves:
        key_heads = [0 if config.is_conv(layer) else config.num_key_value_heads for layer in layers]
    eps = "attention.layer_norm_epsilon" if here.layer_norm else "attention.layer_norm_rms_epsilon"
    uneven = config.intermediate_sizes is not None and here.uneven
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": context_length(config, here),
        "embedding_length": config.hidden_size,
        "feed_forward_length": list(config.intermediate_sizes or ()) if uneven else config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": key_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        eps: float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim if config.rotary_pairs is None else 2 * config.rotary_pairs,
        "vocab_size": config.vocab_size,
    }
    if (moe := config.moe) is not None:
        values |= {"expert_count": moe.num_experts, "expert_used_count": moe.num_experts_per_tok}
        values |= {"expert_feed_forward_length": moe.moe_intermediate_size, **_routing(moe, here)}
        values[here.expert_width] = moe.moe_intermediate_size
        if moe.shared_expert_intermediate_size:
            values["expert_shared_feed_forward_length"] = moe.shared_expert_intermediate_size
    return values


def _routing(moe: MoEConfig, here: Architecture) -> dict[str, Any]:
    """What the file says of how experts are chosen and weighed."""
    said = {
        "gating": {"expert_gating_func": 2 if moe.scoring_func == "sigmoid" else 1},
        "norm": {"expert_weights_norm": moe.norm_topk_prob},
        "scale": {"expert_weights_scale": float(moe.routed_scaling_factor)},
        "lead": {"leading_dense_block_count": len(moe.mlp_only_layers), "interleave_moe_layer_step": 1},
    }
    values = {name: value for part in sorted(here.routing) for name, value in said[part].items()}
    if here.shared in ("may", "must") and moe.shared_expert_intermediate_size:
        values["expert_shared_count"] = moe.shared_expert_intermediate_size // moe.moe_intermediate_size
    return values


def _windows(config: DecoderConfig, here: Architecture) -> dict[str, Any]:
    """What the file says of windows; a layer that sees all has one of the whole context where it must slide."""
    if here.window == "ignored" and config.sliding_window is not None and config.layer_types is None:
        return {"attention.sliding_window": config.sliding_window}
    if not needs_window(here) or here.window_layers not in (0, config.num_hidden_layers):
        return {}
    if config.sliding_window is None and not here.always_slides:
        return {}
    layers = range(config.num_hidden_layers)
    slides = [config.layer_type(layer) == "sliding_attention" for layer in layers]
    assert isinstance(here.window, int)
    usual = [layer % here.window < here.window - 1 for layer in layers]
    values: dict[str, Any] = {"attention.sliding_window": config.sliding_window or config.max_position_embeddings}
    if slides != usual and config.sliding_window is not None:
        values["attention.sliding_window_pattern"] = slides
    if here.rotates == "local" and here.local_base is not None:
        values["rope.freq_base_swa"] = float(config.rope_local_theta)
    return values


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.rope_type == "longrope":
        attention, _ = yarn_magnitudes(scaling)
        values: dict[str, Any] = {"type": "longrope", "attn_factor": float(attention)}
        values["original_context_length"] = scaling.original_max_position_embeddings
    elif scaling.rope_type == "linear":
        values = {"type": "linear", "factor": float(scaling.factor)}
    elif scaling.rope_type == "yarn":
        values = {"type": "yarn", **{name: getattr(scaling, ours) for name, ours in YARN_FIELDS.items()}}
        usual = yarn_magnitudes(RopeScaling(rope_type="yarn", factor=scaling.factor))[0]
        if (rotated := yarn_magnitudes(scaling)[0]) != usual:
            values["attn_factor"] = rotated / usual
    elif scaling.rope_type == "llama3":  # llama.cpp reads the divisors alone; these say what they were made of
        values = {name: getattr(scaling, ours) for name, ours in LLAMA3_FIELDS.items()}
    else:
        values = {}
    return {f"rope.scaling.{name}": value for name, value in values.items()}


def _divisors(config: DecoderConfig) -> dict[str, NDArray[np.float32]]:
    scaling = config.rope_scaling
    if scaling.rope_type == "longrope":
        both = {LONG_FACTORS: scaling.long_factor or scaling.short_factor, SHORT_FACTORS: scaling.short_factor}
        return {name: np.array(factors, np.float32) for name, factors in both.items()}
    if scaling.rope_type != "llama3":
        return {}
    scaled = config.model_copy(update={"layer_rotary": None, "rotary_pairs": None})
    plain = scaled.model_copy(update={"rope_scaling": RopeScaling()})
    return {ROPE_FACTORS: (inverse_frequencies(plain) / inverse_frequencies(scaled)).numpy()}
