"""Folders of families with experts: spellings, what they hold beside the network, what is refused, and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf
from penjing.core.imports.importer import import_model
from tests.core.folded.expert_cases import EXPERT_CASES, PHI_LONGROPE
from tests.core.folded.test_families import save

FIRST = {EXPERT_CASES[name][0]: name for name in reversed(EXPERT_CASES)}  # the first case of each family
OLDER = {"type": "longrope"} | {name: value for name, value in PHI_LONGROPE.items() if name != "rope_type"}
TRINITY = {
    "post_attention_layernorm": "pre_mlp_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
    "self_attn.g_proj": "self_attn.gate_proj",
    "mlp.gate": "mlp.router.gate",
}
AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}


@pytest.mark.parametrize("kind", FIRST)
def test_what_transformers_saves_as_it_has_it_is_the_same(kind: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    """Experts together, and names of its own."""
    found: list[dict[str, Tensor]] = []
    for how in (True, False):
        folder = tmp_path / f"hf_{how}"
        save(folder, tiny_checkpoint, *EXPERT_CASES[FIRST[kind]][:2], save_original_format=how)
        found.append(load_file(import_model(str(folder), tmp_path / f"out_{how}") / "model.safetensors"))
    assert any(".experts.gate_up_proj" in name for name in load_file(tmp_path / "hf_False" / "model.safetensors"))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("glm4_moe_lite", ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.gate.weight")),
        ("hy_v3", ("model.layers.4.eh_proj.weight", "model.layers.4.mlp.router.gate.weight")),
        ("ernie4_5_moe", ("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight")),
        ("exaone_moe", ("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight")),
        ("mellum", ("mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj")),
    ],
)
def test_what_guesses_further_tokens_is_left_out(
    case: str, names: tuple[str, ...], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES[case][:2])
    plain = import_model(str(tmp_path / "hf"), tmp_path / "plain")
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(2) for name in names}, path, {"format": "pt"})
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ("granitemoe", {"num_local_experts": 0}, "num_local_experts must be a positive whole number"),
        ("granite_4_experts", {"layer_types": ["full_attention", "linear_attention"] * 2}, "without attention"),
        ("granitemoe_swa", {"layer_rope_theta": [1.0, 2.0, 3.0, 0]}, "has 3 bases"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5 is not supported; it may be 1e-12 or less"),
        ("ernie4_5_moe", {"moe_layer_end_index": "last"}, "moe_layer_end_index must be whole numbers"),
        ("hunyuan_moe", {"num_shared_expert": 2}, "num_shared_expert=2 is not supported; 1 is"),
        ("hunyuan_moe", {"moe_topk": [1, 1, 2, 1]}, "moe_topk must be the same number for each of 4 layers"),
        ("hunyuan_moe", {"num_experts": [6]}, "num_experts must be the same number for each of 4 layers"),
        ("minimax_m2", {"rotary_dim": 5, "rope_parameters": None}, "is no even number"),
        ("exaone_moe", {"mlp_layer_types": ["dense", "moe"] * 2}, "mlp_layer_types must name dense or sparse"),
        ("exaone_moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        ("exaone_moe", {"n_group": 4}, "n_group=4 must divide num_experts=6"),
        ("solar_open", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("hy_v3", {"num_shared_experts": 0}, "num_shared_experts must be a positive whole number"),
        ("hy_v3", {"hidden_act": "gelu"}, "activation 'gelu' of hy_v3 is not supported"),
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias is not supported with latent attention"),
        ("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("cohere2_moe_sigmoid", {"shared_expert_combination_strategy": "product"}, "sum and average are"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "scoring_func"),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok=3 is not supported; 2 is"),
        ("phimoe", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "'linear' of phimoe is not supported"),
        ("phimoe", {"router_jitter_noise": -1}, "router_jitter_noise"),
        ("phimoe_bias", {"rope_parameters": {"rope_type": "longrope"}}, "original_max_position_embeddings must be"),
        ("cohere2_moe_sum", {"prefix_dense_intermediate_size": None}, "prefix_dense_intermediate_size must be"),
    ],
)
def test_what_no_layer_computes_is_refused_by_name(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES[case][:2])
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=message):
        import_model(str(tmp_path / "hf"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("case", "older"),
    [
        ("minimax_m2", {"rotary_dim": 8, "rope_theta": 10000.0, "rope_parameters": None}),
        ("mellum_full", {"num_local_experts": None, "num_experts": 6}),
        ("ernie4_5_moe", {"moe_k": None, "moe_num_experts": None, "num_experts": 6, "num_experts_per_tok": 2}),
        ("exaone_moe", {"architectures": ["ExaoneMoEForCausalLM"]}),
        ("phimoe_bias", {"architectures": ["PhiMoEForCausalLM"], "rope_parameters": None, "rope_scaling": OLDER}),
        ("hunyuan_moe", {"moe_topk": [2] * 4, "num_shared_expert": [1] * 4, "num_experts": [6] * 4}),
    ],
)
def test_names_that_folders_had_when_they_were_published_say_the_same(
    case: str, older: dict[str, Any], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES[case][:2])
    values = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert fold_from_hf(values | older, "config.json") == fold_from_hf(values, "config.json")


@pytest.mark.parametrize("case", ["granitemoe", "hy_v3", "glm4_moe_lite", "mellum_full"])
def test_what_becomes_of_another_type_is_read_by_transformers(case: str, tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES[case][:2])
    out = import_model(str(tmp_path / "hf"), tmp_path / "out")
    again: Any = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    tokens = torch.arange(3, 30)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, reference(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("solar_open", {}),
        ("mellum", {}),
        ("hy_v3_lists", {}),
        ("minimax_m2_whole", {}),
        ("flex_olmo", AFTER),
        ("afmoe_plain", TRINITY),
        ("hunyuan_moe", {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "mlp.gate": "mlp.gate.wg"}),
    ],
)
def test_gradients_are_those_of_transformers(
    case: str, names: dict[str, str], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """Those of experts, of routers and of what all tokens take included."""
    reference = save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES[case][:2])
    model = load_model(import_model(str(tmp_path / "hf"), tmp_path / "out")).model
    tokens = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("e_score_correction_bias"))
    for logits in (model(tokens), reference(tokens).logits):
        (logits * torch.linspace(-1, 1, 320)).sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, stack in list(expected.items()):
        block, _, leaf = name.rpartition(".experts.")
        for expert, own in enumerate(stack if block else ()):
            parts = {"gate_proj": own[: len(own) // 2], "up_proj": own[len(own) // 2 :]}
            parts = parts if leaf == "gate_up_proj" else {"down_proj": own}
            expected |= {f"{block}.experts.{expert}.{kind}.weight": part for kind, part in parts.items()}
    compared = 0
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        for ours, theirs in names.items():
            name = name.replace(f"{ours}.weight", f"{theirs}.weight")
        wanted = expected.get(name, expected.get(name.replace("shared_experts", "shared_mlp")))
        assert wanted is not None
        compared += 1
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
    assert compared > 50
