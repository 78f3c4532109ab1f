"""Families from before Llama: name → (type of folder, settings of a small network, what it becomes)."""

from __future__ import annotations

from typing import Any

from tests.core.folded.expert_cases import Case

NEWER: dict[str, Any] = {"new_decoder_architecture": True, "num_kv_heads": 2}
OLDER_CASES: dict[str, Case] = {
    "gpt2": ("gpt2", {"n_inner": 40}, "penjing"),
    "gpt2_wide": ("gpt2", {"activation_function": "gelu", "tie_word_embeddings": False}, "penjing"),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 9},
        "penjing",
    ),
    "gpt_neo_global": ("gpt_neo", {"num_layers": 4, "attention_types": [[["global"], 4]]}, "penjing"),
    "gpt_bigcode": ("gpt_bigcode", {"n_inner": 40}, "penjing"),
    "gpt_bigcode_heads": ("gpt_bigcode", {"multi_query": False}, "penjing"),
    "opt": ("opt", {"ffn_dim": 40, "word_embed_proj_dim": 48}, "penjing"),
    "opt_plain": ("opt", {"word_embed_proj_dim": 48, "enable_bias": False, "tie_word_embeddings": False}, "penjing"),
    "gptj": ("gptj", {"rotary_dim": 4, "n_inner": 40}, "penjing"),
    "gptj_whole": ("gptj", {"rotary_dim": 12}, "penjing"),
    "falcon": ("falcon", {"ffn_hidden_size": 40}, "penjing"),
    "falcon_new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "activation": "gelu_new"},
        "penjing",
    ),
    "falcon_new_one": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        "penjing",
    ),
    "falcon_in_turn": ("falcon", {"parallel_attn": False, "multi_query": False, "bias": True}, "penjing"),
}
