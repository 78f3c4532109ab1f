"""Forms of networks with experts; see `forms`. Each type has its own words for the same numbers, and takes no notice of
those of others."""

from __future__ import annotations

from collections.abc import Callable

from penjing.core.models.config import DecoderConfig
from penjing.core.published.fields import Values, convolutions, kinds, two_bases, unrotated


def _routed(config: DecoderConfig) -> Values:
    moe = config.moe
    if moe is None:
        return {}
    shared = moe.shared_expert_intermediate_size
    dense = set(moe.mlp_only_layers)
    values: Values = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), moe.num_experts)
    values |= dict.fromkeys(("n_shared_experts", "num_shared_experts"), shared // moe.moe_intermediate_size)
    values |= dict.fromkeys(("routed_scaling_factor", "router_scaling_factor"), moe.routed_scaling_factor)
    return values | {
        "num_experts_per_tok": moe.num_experts_per_tok,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": moe.norm_topk_prob,
        "n_group": moe.n_group,
        "topk_group": moe.topk_group,
        "first_k_dense_replace": len(dense),
    }


def _named(config: DecoderConfig) -> Values:
    """With a kind of MLP for each layer."""
    dense = () if config.moe is None else config.moe.mlp_only_layers
    kinds = ["dense" if layer in dense else "sparse" for layer in range(config.num_hidden_layers)]
    return _routed(config) | {"mlp_layer_types": kinds}


def _glm4_moe(config: DecoderConfig) -> Values:
    return _routed(config) | {"use_qk_norm": config.qk_norm}


def _exaone_moe(config: DecoderConfig) -> Values:
    return _named(config) | unrotated(config)


def _minimax_m2(config: DecoderConfig) -> Values:
    inner = {} if config.moe is None else {"intermediate_size": config.moe.moe_intermediate_size}
    pairs = config.head_dim // 2 if config.rotary_pairs is None else config.rotary_pairs
    return _routed(config) | inner | {"rotary_dim": 2 * pairs}


def _mellum(config: DecoderConfig) -> Values:
    return _named(config) | two_bases(config)


def _lfm2_moe(config: DecoderConfig) -> Values:
    dense = 0 if config.moe is None else len(config.moe.mlp_only_layers)
    biased = config.moe is not None and config.moe.router_bias
    return _routed(config) | convolutions(config) | {"num_dense_layers": dense, "use_expert_bias": biased}


def _afmoe(config: DecoderConfig) -> Values:
    values = _routed(config)
    names = {"route_scale": "routed_scaling_factor", "num_dense_layers": "first_k_dense_replace"}
    own = {theirs: values[ours] for theirs, ours in names.items() if ours in values}
    window = config.sliding_window or config.max_position_embeddings  # it has one even where no layer slides
    fixed = {"mup_enabled": False, "global_attn_every_n_layers": 4, "sliding_window": window}
    return values | own | kinds(config) | fixed


EXPERT_FORMS: dict[str, Callable[[DecoderConfig], Values]] = {
    "olmoe": _routed,
    "flex_olmo": _routed,
    "glm4_moe": _glm4_moe,
    "solar_open": _named,
    "hy_v3": _named,
    "exaone_moe": _exaone_moe,
    "minimax_m2": _minimax_m2,
    "mellum": _mellum,
    "lfm2_moe": _lfm2_moe,
    "afmoe": _afmoe,
}
"""Type of folder → what its `config.json` says beside and otherwise than Llama's."""
