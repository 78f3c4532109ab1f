"""Families whose weights are folded when they are read: logits of what is imported against transformers'."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from penjing.core.models.hf_config import FOLDED
from tests.core.folded.conv_cases import CONV_CASES, CONV_NAMES, CONV_NAMES_3
from tests.core.folded.expert_cases import EXPERT_CASES, LATENT
from tests.core.folded.gemma4_cases import GEMMA4_CASES
from tests.core.folded.older_cases import OLDER_CASES
from tests.core.folded.seeing_cases import SEEING_CASES

PLUS_ONE = ("gemma", "gemma2", "gemma3_text", "gemma3", "nemotron", "vaultgemma")
SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e5,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.5],
    "long_factor": [1.5, 2.0, 4.0, 8.0, 16.0, 30.0],
    "original_max_position_embeddings": 64,
}
PARTIAL = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
CAPS = {"final_logit_softcapping": 1.5, "attn_logit_softcapping": 2.0}
GRANITE_4: dict[str, Any] = {
    "layer_types": ["full_attention"] * 4,
    "num_local_experts": 0,
    "shared_intermediate_size": 72,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.0156,
    "mamba_n_heads": 4,
}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}
LLAMA_4 = YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
CASES: dict[str, tuple[str, dict[str, Any], str]] = (
    {
        "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 3}, "penjing"),
        "gemma3_scaled": (
            "gemma3_text",
            {
                "head_dim": 24,
                "query_pre_attn_scalar": 20,
                "sliding_window": 9,
                "num_key_value_heads": 1,
                "rope_parameters": {
                    "full_attention": LINEAR,
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                },
            },
            "penjing",
        ),
        "granite": (
            "granite",
            {
                "embedding_multiplier": 12.0,
                "logits_scaling": 8.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.0156,
                "tie_word_embeddings": True,
                "mlp_bias": True,
                "attention_bias": True,
            },
            "llama",
        ),
        "granite_untied": ("granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}, "llama"),
        "smollm3": ("smollm3", {}, "penjing"),
        "smollm3_window": ("smollm3", {"use_sliding_window": True, "sliding_window": 10}, "penjing"),
        "olmo2": ("olmo2", {}, "penjing"),
        "olmo3": ("olmo3", {"sliding_window": 10}, "penjing"),
        "olmo3_yarn": (
            "olmo3",
            {
                "sliding_window": 10,
                "rope_parameters": {
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
                },
            },
            "penjing",
        ),
        "phi3": ("phi3", {}, "llama"),
        "phi3_window": ("phi3", {"sliding_window": 11}, "mistral"),
        "phi3_longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, "llama"),
        "phi3_longrope_partial": (
            "phi3",
            {
                "rope_parameters": LONGROPE
                | {name: LONGROPE[name][:3] for name in ("short_factor", "long_factor")}
                | {"partial_rotary_factor": 0.5},
                "original_max_position_embeddings": 64,
            },
            "penjing",
        ),
        "phi3_partial": ("phi3", {"rope_parameters": PARTIAL}, "penjing"),
        "exaone4": ("exaone4", {"sliding_window": 10}, "penjing"),
        "exaone4_full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, "penjing"),
        "glm": ("glm", {"head_dim": 12, "rope_parameters": PARTIAL | {"partial_rotary_factor": 2 / 3}}, "penjing"),
        "glm4": ("glm4", {"head_dim": 16, "rope_parameters": PARTIAL}, "penjing"),
        "helium": ("helium", {"head_dim": 12}, "llama"),
        "ernie4_5": ("ernie4_5", {"head_dim": 12}, "llama"),
        "ministral": ("ministral", {"sliding_window": 9, "head_dim": 12}, "mistral"),
        "seed_oss": ("seed_oss", {"head_dim": 12}, "qwen2"),
        "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 20} | CAPS, "penjing"),
        "gemma2_uncapped": (
            "gemma2",
            {"head_dim": 16, "final_logit_softcapping": None, "attn_logit_softcapping": None},
            "penjing",
        ),
        "arcee": ("arcee", {"mlp_bias": True}, "penjing"),
        "starcoder2": ("starcoder2", {"sliding_window": 11}, "penjing"),
        "starcoder2_untied": ("starcoder2", {"tie_word_embeddings": False, "use_bias": False}, "penjing"),
        "phi": ("phi", {"rope_parameters": PARTIAL}, "penjing"),
        "gpt_neox": ("gpt_neox", {"num_key_value_heads": 4, "rope_parameters": PARTIAL}, "penjing"),
        "gpt_neox_in_turn": (
            "gpt_neox",
            {
                "num_key_value_heads": 4,
                "use_parallel_residual": False,
                "attention_bias": False,
                "hidden_act": "gelu_new",
            }
            | {"rope_parameters": PARTIAL},
            "penjing",
        ),
        "cohere": ("cohere", {"logit_scale": 0.5, "attention_bias": True}, "penjing"),
        "cohere2": ("cohere2", {"sliding_window": 9, "logit_scale": 0.25}, "penjing"),
        "stablelm": ("stablelm", {"rope_parameters": PARTIAL, "use_qkv_bias": True}, "penjing"),
        "stablelm_parallel": ("stablelm", {"rope_parameters": PARTIAL, "use_parallel_residual": True}, "penjing"),
        "nemotron": ("nemotron", {"rope_parameters": PARTIAL}, "penjing"),
        "nemotron_bias": (
            "nemotron",
            {"rope_parameters": PARTIAL, "attention_bias": True, "mlp_bias": True},
            "penjing",
        ),
        "gemma": ("gemma", {"head_dim": 16}, "penjing"),
        "gemma_untied": ("gemma", {"head_dim": 12, "tie_word_embeddings": False, "attention_bias": True}, "penjing"),
        "vaultgemma": (
            "vaultgemma",
            {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 20} | CAPS,
            "penjing",
        ),
        "granite_4": ("granitemoehybrid", GRANITE_4 | {"position_embedding_type": "rope"}, "llama"),
        "granite_4_nope": ("granitemoehybrid", GRANITE_4 | {"tie_word_embeddings": True}, "penjing"),
        "hyperclovax": (
            "hyperclovax",
            {"embedding_multiplier": 10.0, "logits_scaling": 0.125, "residual_multiplier": 0.3},
            "penjing",
        ),
        "hyperclovax_before": (
            "hyperclovax",
            {"use_post_norm": False, "attention_multiplier": 0.2}
            | {"residual_multiplier": 0.3, "tie_word_embeddings": True},
            "llama",
        ),
        "internlm3": ("internlm3", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}, "llama"),
        "iquestcoder": ("iquestcoder", {"head_dim": 12}, "llama"),
        "cwm": ("cwm", {"head_dim": 16, "sliding_window": 10}, "penjing"),
        "ministral3": ("ministral3", {"head_dim": 12, "rope_parameters": LLAMA_4}, "llama"),
        "ministral3_window": (
            "ministral3",
            {"head_dim": 12, "rope_parameters": LLAMA_4, "sliding_window": 9},
            "mistral",
        ),
        "hunyuan": ("hunyuan_v1_dense", {"head_dim": 12, "rope_parameters": ALPHA}, "penjing"),
        "hunyuan_plain": ("hunyuan_v1_dense", {"head_dim": 16, "attention_bias": True}, "penjing"),
        "minicpm3": ("minicpm3", LATENT | {"dim_model_base": 16, "scale_depth": None}, "penjing"),
        "minicpm3_longrope": (
            "minicpm3",
            LATENT
            | {"tie_word_embeddings": False, "original_max_position_embeddings": 64}
            | {"rope_parameters": LONGROPE | {"short_factor": [1.0, 2.0], "long_factor": [1.5, 4.0]}},
            "penjing",
        ),
        "youtu": ("youtu", LATENT, "penjing"),
        "youtu_plain": ("youtu", LATENT | {"q_lora_rank": None, "tie_word_embeddings": False}, "penjing"),
        "nanochat": ("nanochat", {"final_logit_softcapping": 1.5}, "penjing"),
        "nanochat_tied": ("nanochat", {"tie_word_embeddings": True}, "penjing"),
        "jais2": ("jais2", {}, "penjing"),
        "jais2_plain": ("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True}, "penjing"),
        "granite_swa": (
            "granite_swa",
            {
                "sliding_window": 9,
                "layer_rope_theta": [0, 10000.0, 500000.0, 10000.0],
                "embedding_multiplier": 12.0,
                "logits_scaling": 8.0,
                "residual_multiplier": 0.22,
                "attention_multiplier": 0.2,
            },
            "penjing",
        ),
        "granite_swa_plain": (
            "granite_swa",
            {"sliding_window": 9, "attention_bias": True, "mlp_bias": True, "attention_multiplier": 12**-0.5},
            "penjing",
        ),
        "gpt_oss": (
            "gpt_oss",
            {"head_dim": 16, "sliding_window": 9, "num_local_experts": 6, "num_experts_per_tok": 2}
            | {"rope_parameters": YARN | {"truncate": False}},
            "penjing",
        ),
        "gpt_oss_full": (
            "gpt_oss",
            {
                "head_dim": 12,
                "layer_types": ["full_attention"] * 4,
                "sliding_window": 9,
                "attention_bias": False,
                "num_local_experts": 3,
                "num_experts_per_tok": 3,
                "tie_word_embeddings": True,
            },
            "penjing",
        ),
        "apertus": ("apertus", {}, "penjing"),
        "apertus_bias": ("apertus", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}, "penjing"),
        "bitnet": ("bitnet", {"hidden_act": "relu2"}, "penjing"),
        "bitnet_tied": ("bitnet", {"tie_word_embeddings": True, "attention_bias": True}, "penjing"),
        "olmo": ("olmo", {"tie_word_embeddings": True}, "llama"),
        "olmo_bias": ("olmo", {"attention_bias": True}, "llama"),
    }
    | OLDER_CASES
    | EXPERT_CASES
    | CONV_CASES
    | GEMMA4_CASES
    | SEEING_CASES
)


def save(folder: Path, tokenizer: Path, kind: str, changes: dict[str, Any], **how: Any) -> Any:
    """A random model of transformers, saved to `folder`; no parameter is left at zero or one, and no bias of a choice
    that is no parameter."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if "vision_config" in changes else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(kind, **(SMALL | changes)), attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            plain = 1.0 if "norm" in name and name.endswith("weight") and kind not in PLUS_ONE else 0.0
            parameter.copy_(plain + torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.15))
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            elif name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
    model.save_pretrained(folder, **how)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, becomes = CASES[case]
    reference = save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert open_checkpoint(out).config.model_type == becomes
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        found = load_model(out).model(tokens)
    assert float(expected.std()) > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["smollm3", "olmo3", "helium", "cwm", "ministral3"])
@pytest.mark.parametrize("said", ["nothing", "as transformers 4"])
def test_rotary_settings_that_are_left_out_or_have_older_names_are_those_of_transformers(
    case: str, said: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    scaling = {name: value for name, value in LLAMA_4.items() if name != "rope_theta"}
    older = {"rope_theta": LLAMA_4["rope_theta"], "rope_scaling": scaling}
    path.write_text(json.dumps(values | (older if said != "nothing" else {})))
    reference: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(tokens).logits
        found = load_model(out).model(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["gpt2", "gpt_neox"])
def test_names_without_their_first_word_are_those_of_the_network_without_its_head(
    case: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """As GPT-2 was published."""
    save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    whole = import_model(str(tmp_path / "hf"), tmp_path / "whole")
    weights = tmp_path / "hf" / "model.safetensors"
    named = {name.removeprefix("transformer.").removeprefix("gpt_neox."): x for name, x in load_file(weights).items()}
    assert named.keys() != load_file(weights).keys()
    save_file(named, weights, {"format": "pt"})
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


APERTUS = {
    "gate_proj": "up_proj",
    "input_layernorm": "attention_layernorm",
    "post_attention_layernorm": "feedforward_layernorm",
}


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("apertus", APERTUS),
        ("granite_swa_plain", {}),
        ("gpt_oss", {"mlp.gate.": "mlp.router."}),
        ("lfm2_bias", CONV_NAMES),
        ("lfm3", CONV_NAMES_3),
    ],
)
def test_gradients_are_those_of_transformers(
    case: str, names: dict[str, str], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """Of families without folded factors, whose activation and attention have parameters of their own."""
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES[case][:2])
    model = load_model(import_model(str(tmp_path / "hf"), tmp_path / "out")).model
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    for parameter in model.parameters():
        parameter.requires_grad_()
    for logits in (model(tokens), reference(tokens).logits):
        (logits * torch.linspace(-1, 1, 320)).sum().backward()
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            continue  # which transformers keeps together
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        wanted = expected[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def test_every_family_has_a_case() -> None:
    assert {kind for kind, _, _ in CASES.values()} == set(FOLDED)


def test_what_transformers_reads_again_is_the_same(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *CASES["granite"][:2])
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    again: Any = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-5)


def test_a_folder_that_was_not_imported_says_how(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["olmo2"][:2])
    with pytest.raises(InputError, match="'penjing import FOLDER NEW_FOLDER'"):
        load_model(tmp_path / "hf")


def test_a_tensor_that_is_missing_is_named(tmp_path: Path, tiny_checkpoint: Path) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *CASES["phi3"][:2])
    save(tmp_path / "other", tiny_checkpoint, "phi3", {"intermediate_size": 38})
    shutil.copyfile(tmp_path / "other" / "model.safetensors", tmp_path / "hf" / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight has the shape \(36, 48\)"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
