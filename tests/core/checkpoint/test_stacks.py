"""Experts of a layer in one tensor, as transformers 5 keeps them in memory and may save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.imports.importer import import_model
from tests.core.folded.expert_cases import LATENT

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DEEPSEEK: dict[str, Any] = {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPED: dict[str, Any] = LATENT | {"n_group": 1, "topk_group": 1}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"num_experts": 6, "mlp_only_layers": [1], "head_dim": 12},
    "dots1": DEEPSEEK,
    "deepseek_v3": DEEPSEEK | GROUPED,
}
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def stacked(folder: Path, tokenizer: Path, kind: str) -> Any:
    """A random model of transformers, saved to `folder` as it lies in memory."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(SMALL | KINDS[kind])), attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(float("norm" in name) + torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder, save_original_format=False)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in load_file(folder / "model.safetensors"))
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_read_one_by_one(kind: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = stacked(tmp_path / "hf", tiny_checkpoint, kind)
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    for folder in (tmp_path / "hf", import_model(str(tmp_path / "hf"), tmp_path / "out")):
        assert open_checkpoint(folder).config.model_type == kind
        with torch.no_grad():
            found, expected = load_model(folder).model(tokens), reference(tokens).logits
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5 * float(expected.abs().max()))
    assert not any("gate_up_proj" in name for name in load_file(tmp_path / "out" / "model.safetensors"))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 48, 48), "has shape .5, 48, 48.; 6 experts"),
        ((6, 47, 48), "has shape .6, 47, 48.; 6 experts"),
        ((288, 48), "has shape .288, 48.; 6 experts"),
        ((6, 44, 48), r"experts\.0\.gate_proj\.weight has the shape \(22, 48\)"),
    ],
)
def test_stacks_that_do_not_fit_are_refused(
    shape: tuple[int, ...], message: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    stacked(tmp_path / "hf", tiny_checkpoint, "mixtral")
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {STACK: torch.zeros(shape)}, path, {"format": "pt"})
    with pytest.raises(InputError, match=message.replace("experts\\.0", r"layers\.1\.mlp\.experts\.0")):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_experts_than_any_network_has_are_refused_before_each_has_a_name(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    stacked(tmp_path / "hf", tiny_checkpoint, "mixtral")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_local_experts": 4096}))
    many = {f"model.layers.{layer}.mlp.experts.down_proj": torch.zeros(1) for layer in range(1000)}
    weights = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(weights) | many, weights, {"format": "pt"})
    with pytest.raises(InputError, match="holds more than 200000 experts; it is damaged"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
