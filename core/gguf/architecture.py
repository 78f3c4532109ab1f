"""What an architecture of GGUF is, and the names of its tensors (ggml-org/ggml, docs/gguf.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

ANY = "*"  # in place of an expert's number
QKV, OUT, MLP, HEAD = (frozenset({each}) for each in ("qkv", "out", "mlp", "head"))  # biases
LONG = frozenset({"default", "linear", "yarn"})  # rotary scalings that llama.cpp computes of numbers alone
OUTSIDE: Mapping[str, str] = MappingProxyType(
    {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
)
IN_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "attention_output_norm": "post_attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp_output_norm": "post_ffw_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.e_score_correction_bias": "exp_probs_b.bias",
        f"mlp.experts.{ANY}.gate_proj": f"ffn_gate_exps.{ANY}",
        f"mlp.experts.{ANY}.up_proj": f"ffn_up_exps.{ANY}",
        f"mlp.experts.{ANY}.down_proj": f"ffn_down_exps.{ANY}",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
        "mlp.shared_experts.up_proj": "ffn_up_shexp",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
        "self_attn.sinks": "attn_sinks.weight",
        "conv.in_proj": "shortconv.in_proj",
        "conv.taps": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
    }
)
"""Modules in a layer → their names in the file; an expert's number stands at the end, as of a part of a tensor."""
Rotates = Literal["all", "local", "sliding", "fourth"]


@dataclass(frozen=True)
class Architecture:
    """A network of these fields, and how a file holds it.

    Attributes:
        name: general.architecture of the file.
        kind: `model_type` of a network that is of this one and no other; "penjing": whatever it computes.
        fields: fields of `DecoderConfig` that it has, where they are not the usual ones.
        experts: the same of `MoEConfig`; None: it has no experts.
        dense: whether it may be without experts.
        choice: whether experts have biases that count for their choice alone: "no", "may" or "must".
        shared: beside its experts each layer has "no" MLP that all tokens take, "may" or "must" have one, or one that
            is "gated".
        biases: which it may have of "qkv", "out", "mlp", "head".
        needed: biases that a file must have; zeros where the network has none.
        layer_norm: its norms subtract the mean. The networks here have streams without one, where this is RMSNorm.
        stored: of such norms, what the file holds: "norm", their weights, and "shift", their biases.
        tied: whether the LM head is the embedding; None: either.
        scaled: the embedding is multiplied by the root of the width when it is looked up.
        wide_queries: layers of the network whose scores are divided by the root of width / heads, not of a head.
        interleaved: dimensions 2i and 2i + 1 of a head rotate together.
        partial: it rotates the first rope.dimension_count dimensions of a head alone, where others rotate all.
        square: its heads together are as wide as the stream.
        ungrouped: each head of queries has keys of its own.
        fused: queries, keys and values are one matrix, as it is written; a file that is read may have either.
        fused_mlp: gate and up are one matrix.
        names: modules in a layer whose names differ from IN_LAYER.
        outside: the same of OUTSIDE.
        scalings: of rotary frequencies.
        whole_pairs: whether YaRN blends between whole pairs, which llama.cpp does of all networks.
        expert_width: metadata of the inner width of an expert.
        routing: what a file says of its experts, of "gating", how outputs of the router become scores; "norm", whether
            those that are chosen are divided by their sum; "scale", their factor; "lead", how many layers come first
            that have none. What it does not say is as `experts` and the usual `MoEConfig` have it.
        maybe_normed: queries and keys have norms where the file has them.
        window: what `attention.sliding_window` says. "none": it is not there; "ignored": a window of all layers that
            llama.cpp does not compute; else the number of layers of which the last sees all.
        window_layers: it has a window only where it has so many layers; 0: always where one is said.
        usual_window: of files that say none.
        always_slides: layers slide, whether a file says a window or not.
        rotates: "all"; "local": sliding layers by a base of their own, without scaling; "sliding": where there are
            any, only sliding layers rotate; "fourth": every fourth layer does not.
        local_base: the base of sliding layers of files that do not say it; None: always that of the others.
        caps: metadata of soft caps → (field, what files that say none have).
        flags: metadata → the field that is true where it is, as it is where a file does not say it.
        factors: which a file says apart from its weights: of the "logits", or "all", as Granite's, where logits are
            divided by theirs.
        convolves: whether layers without heads are short convolutions.
        uneven: the MLPs of its layers may differ in width.
    """

    name: str
    kind: str = "penjing"
    fields: Mapping[str, Any] = field(default_factory=dict)
    experts: Mapping[str, Any] | None = None
    dense: bool = True
    choice: Literal["no", "may", "must"] = "no"
    shared: Literal["no", "may", "must", "gated"] = "no"
    biases: frozenset[str] = QKV
    needed: frozenset[str] = frozenset()
    layer_norm: bool = False
    stored: frozenset[str] = frozenset()
    tied: bool | None = None
    scaled: bool = False
    wide_queries: int = 0
    interleaved: bool = False
    partial: bool = False
    square: bool = False
    ungrouped: bool = False
    fused: bool = False
    fused_mlp: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    scalings: frozenset[str] = LONG
    whole_pairs: bool = True
    routing: frozenset[str] = frozenset()
    maybe_normed: bool = False
    expert_width: str = "expert_feed_forward_length"
    window: int | Literal["none", "ignored"] = "none"
    window_layers: int = 0
    usual_window: int = 0
    always_slides: bool = False
    rotates: Rotates = "all"
    local_base: float | None = None
    caps: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    factors: Literal["none", "logits", "all"] = "none"
    convolves: bool = False
    uneven: bool = False
