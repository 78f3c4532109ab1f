"""What no layer of ours computes is refused by name, before anything is written; layers that guess further tokens are
left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from tests.core.folded.test_families import CASES, LONGROPE, save


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
        ("gemma3", {"hidden_activation": "silu"}, "activation 'silu' of gemma3_text is not supported"),
        ("gemma3", {"architectures": ["Gemma3TextModel"]}, "take a Gemma3ForCausalLM folder"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "lacks short_factor",
        ),
        ("phi3_longrope", {"rope_parameters": LONGROPE | {"short_factor": [1.0, 2.0]}}, "short_factor has 2 numbers"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must have a number for each of 4"),
        ("glm4", {"rope_parameters": None, "partial_rotary_factor": 0.1}, "is no even number"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm=True is not supported"),
        ("phi", {"hidden_act": "relu"}, "activation 'relu' of phi is not supported; gelu_new"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ("olmo", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("gpt_neox", {"use_parallel_residual": "yes"}, "use_parallel_residual must be true or false"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number"),
        ("granite_4", {"layer_types": ["attention", "mamba"] * 2}, "names layers without attention"),
        ("granite_4", {"num_local_experts": -4}, "num_local_experts must be a positive whole number"),
        ("granite_4", {"position_embedding_type": "learned"}, "position_embedding_type 'learned' is not supported"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "lack original_max_position"),
        ("minicpm3", {"num_attention_heads": 1e-308}, "num_attention_heads must be a positive whole number"),
        ("hyperclovax", {"use_post_norm": 1}, "use_post_norm must be true or false"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
        ("gpt2", {"n_embd": None}, "hidden_size must be a positive whole number"),
        ("gpt2", {"activation_function": "relu"}, "activation 'relu' of gpt2 is not supported"),
        ("gpt_neo", {"attention_types": [["global", 4]]}, "attention_types must say global or local"),
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "names 3 layers, num_layers is 4"),
        ("gpt_neo", {"attention_types": [[["global"], 10**15]]}, "names 5 layers, num_layers is 4"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before=False is not supported"),
        ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim=24 is not supported"),
        ("gpt_bigcode", {"multi_query": 1}, "multi_query must be true or false"),
        ("gptj", {"rotary_dim": 0}, "rotary_dim must be a positive whole number"),
        ("falcon", {"alibi": True}, "alibi=True is not supported"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 with parallel_attn=True"),
        ("falcon_new", {"parallel_attn": False}, "parallel_attn=False and new_decoder_architecture=True"),
        ("falcon_new", {"num_kv_heads": 4}, r"q_proj\.weight has the shape"),
        ("granite_swa", {"layer_rope_theta": [1.0, 2.0, 3.0, 0]}, "has 3 bases"),
        ("granite_swa", {"layer_rope_theta": [1.0]}, "must have a number for each of 4 layers"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "swiglu_limit=6.0 is not supported"),
        ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok=7 is above num_experts=6"),
        ("apertus", {"hidden_act": "silu"}, "activation 'silu' of apertus is not supported; xielu"),
        ("olmo3", {"layer_types": ["linear_attention"] * 4}, "layer_types must name"),
    ],
)
def test_what_no_layer_computes_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(InputError, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_layers_beyond_those_of_the_network_are_left_out(tmp_path: Path, tiny_checkpoint: Path) -> None:
    """GLM 4.5 has one that guesses the token after the next."""
    save(tmp_path / "hf", tiny_checkpoint, *CASES["glm4_moe"][:2])
    plain = import_model(str(tmp_path / "hf"), tmp_path / "plain")
    path = tmp_path / "hf" / "model.safetensors"
    more = {f"model.layers.4.{name}": torch.ones(2) for name in ("eh_proj.weight", "mlp.gate.weight", "enorm.weight")}
    save_file(load_file(path) | more, path, {"format": "pt"})
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
