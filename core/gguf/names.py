"""Names of a decoder's tensors in GGUF (ggml-org/ggml, docs/gguf.md) and in our models.

The experts of a layer are one tensor there, (experts, rows, columns), and have a tensor each here.
"""

from __future__ import annotations

import re

PAIRED = ("llama", "mistral", "deci")
"""Architectures that compute as Llama, where the rows of q and k are in the order of interleaved rotary pairs."""
GEMMA = "gemma3"
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies; they follow from the configuration
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of longrope: divisors too
YARN_FIELDS = {  # below rope.scaling.
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
LLAMA3_FIELDS = {  # below rope.scaling. in files of ours; other files have the divisors alone
    "llama3_factor": "factor",  # not "factor", by which llama.cpp divides all frequencies again
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_context_length": "original_max_position_embeddings",
}
END_OF_TURN = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]")
)
EXPERTS = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}
"""`model_type` of a network with experts → GGUF architecture."""
ANY = "*"  # in place of an expert's number
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "attention_output_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "mlp_output_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{ANY}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{ANY}.up_proj",
    "ffn_down_exps": f"mlp.experts.{ANY}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_TOP_LEVEL_BACK = {ours: theirs for theirs, ours in _TOP_LEVEL.items()}
_IN_LAYER_BACK = {ours: theirs for theirs, ours in _IN_LAYER.items()}


def expert_of(name: str) -> tuple[str, int | None]:
    """`model.layers.3.mlp.experts.5.up_proj.weight` → that with ANY for the number, and 5; another name and None."""
    found = _EXPERT.search(name)
    return (name, None) if found is None else (_EXPERT.sub(f".mlp.experts.{ANY}.", name), int(found[1]))


def model_name_of(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; that of experts has ANY for their number;
    a name that is not known stays as it is."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _TOP_LEVEL:
        return f"{_TOP_LEVEL[stem]}.{kind}"
    prefix, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if prefix == "blk" and layer.isdecimal() and part in _IN_LAYER:
        return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}"
    return gguf_name


def gguf_name_of(name: str) -> str:
    """Undo `model_name_of`, for a name that it gives."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP_LEVEL_BACK:
        return f"{_TOP_LEVEL_BACK[stem]}.{kind}"
    _, _, layer, part = expert_of(f"{stem}.")[0].rstrip(".").split(".", 3)
    return f"blk.{layer}.{_IN_LAYER_BACK[part]}.{kind}"
