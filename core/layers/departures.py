"""Fields of `DecoderConfig` by which a layer departs from those of all Hugging Face types of `hf_config`."""

from __future__ import annotations

from typing import Any

DEPARTURES = (
    "qk_norm_over",
    "qk_norm_rotated",
    "value_norm",
    "layer_scales",
    "token_inputs",
    "shared_keys",
    "norms",
    "inner_norms",
    "activation",
    "mlp_gated",
    "parallel",
    "head_bias",
    "attention_cap",
    "attention_sinks",
    "attention_gate",
    "logit_cap",
    "layer_rotary",
    "rotary_pairs",
    "rotary_local_pairs",
    "learned_positions",
    "table_hadamard",
    "conv_taps",
)
BESIDE_EXPERTS = (
    "attention_sinks",
    "attention_gate",
    "qk_norm_over",
    "qk_norm_rotated",
    "value_norm",
    "layer_scales",
    "layer_rotary",
    "rotary_pairs",
    "rotary_local_pairs",
    "norms",
    "parallel",
    "head_bias",
    "logit_cap",
    "table_hadamard",
    "conv_taps",
)
"""Those of what stands around experts."""


def departures_of(config: Any) -> list[str]:
    """Where a layer of a `DecoderConfig` departs from Llama's in ways that no Hugging Face type of `hf_config` has, as
    NAME=VALUE. Whatever computes a layer knows each of them or refuses it by this name."""
    usual = {name: type(config).model_fields[name].default for name in DEPARTURES}
    found = {name: value for name in DEPARTURES if (value := getattr(config, name)) != usual[name]}
    if (kinds := found.get("layer_rotary")) is not None:
        found["layer_rotary"] = "/".join(sorted(set(kinds)))
    return [f"{name}={value}" for name, value in found.items()]


def check_departures(config: Any) -> None:
    """Whether the departures of a `DecoderConfig` go together.

    Raises:
        ValueError: they do not.
    """
    found = config.departures()
    if found and config.model_type != "penjing":
        raise ValueError(f"{', '.join(found)}: only the model_type 'penjing' has that")
    alone = config.latent_attention is None and config.shared_layers == 1
    beside = [each for each in found if not (alone and each.partition("=")[0] in BESIDE_EXPERTS)]
    if beside and (not alone or config.moe is not None):
        raise ValueError(f"{', '.join(beside)}: not beside moe, latent_attention or shared_layers")
    if config.layer_rotary is not None and len(config.layer_rotary) != config.num_hidden_layers:
        raise ValueError(
            f"layer_rotary names {len(config.layer_rotary)} layers, num_hidden_layers is {config.num_hidden_layers}"
        )
    if config.rotary_pairs is not None and config.rotary_pairs >= config.head_dim // 2:
        raise ValueError(
            f"rotary_pairs={config.rotary_pairs}: below head_dim / 2 = {config.head_dim // 2}, or left out"
        )
    if config.rotary_local_pairs is not None and config.rotary_local_pairs > config.head_dim // 2:
        raise ValueError(f"rotary_local_pairs={config.rotary_local_pairs}: at most {config.head_dim // 2}")
    if config.attention_gate is None and config.attention_gate_function != "sigmoid":
        raise ValueError(f"attention_gate_function={config.attention_gate_function!r} needs attention_gate")
    if config.qk_norm_over == "all" and (not config.qk_norm or config.qk_norm_rotated):
        raise ValueError("qk_norm_over='all' needs qk_norm, and does not go with qk_norm_rotated")
    if config.qk_norm_rotated and not config.qk_norm:
        raise ValueError("qk_norm_rotated needs qk_norm")
    if config.mlp_gated and config.activation not in ("silu", "gelu_tanh", "relu2"):
        raise ValueError(f"activation={config.activation!r} is of an MLP without a gate: set mlp_gated=false")
    if config.parallel and config.norms != "before":
        raise ValueError(f"parallel layers have their norms before them, not norms={config.norms!r}")
    if config.parallel and (config.layer_scales or config.token_inputs):
        raise ValueError(
            "layer_scales and token_inputs are of layers whose halves follow each other: not with parallel"
        )
    if config.head_bias and config.tie_word_embeddings:
        raise ValueError("head_bias is of an output layer of its own: set tie_word_embeddings=false")
    _check_shared_keys(config)


def _check_shared_keys(config: Any) -> None:
    shared, layers = config.shared_keys, range(config.num_hidden_layers)
    if not shared:
        return
    kinds = ("full_attention", "sliding_attention")
    if any(config.layer_type(layer) not in kinds for layer in layers) or config.sliding_windows is not None:
        raise ValueError(f"shared_keys={shared} is of layers that see all or slide alike")
    own = {config.layer_type(layer) for layer in layers[: len(layers) - shared]}
    if shared >= len(layers) or not {config.layer_type(layer) for layer in layers} <= own:
        raise ValueError(f"shared_keys={shared}: each kind of layer needs one before the last {shared} to read from")
