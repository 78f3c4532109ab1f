"""Families with gates of attention: what their config.json says, heads that layers lack, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AfmoeConfig, LagunaConfig, Lfm3Config

from penjing.compress.run import run_recipe
from penjing.compress.verify import verify_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.folded.families import fold_from_hf
from penjing.core.imports.importer import import_model
from penjing.core.runtime.fused import fuse_decoder
from tests.compress.conftest import write_recipe
from tests.compress.decoder.test_families import FOUR
from tests.core.folded.expert_cases import EXPERT_CASES
from tests.core.folded.test_families import save
from tests.kernels.cpu import needs_extension

CONFIGS: dict[str, Any] = {"afmoe": AfmoeConfig, "laguna": LagunaConfig, "lfm3": Lfm3Config}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
MORE = ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "sliding_window", "num_key_value_heads")
LAGUNA = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "num_attention_heads_per_layer": [48, 64, 64, 48],
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_the_file_leaves_out_is_what_transformers_assumes(kind: str) -> None:
    config, theirs = fold_from_hf({"model_type": kind}, "it").config, CONFIGS[kind]()
    for name in (*SIZES, *MORE):
        if (name, kind) != ("sliding_window", "laguna"):  # no layer slides
            assert getattr(config, name) == getattr(theirs, name), name
    types = ["full_attention" if layer == "full_attention" else "else" for layer in theirs.layer_types]
    found = [config.layer_type(layer) for layer in range(config.num_hidden_layers)]
    assert ["full_attention" if layer == "full_attention" else "else" for layer in found] == types
    if config.moe is not None:
        assert config.moe.num_experts == theirs.num_experts
        assert config.moe.num_experts_per_tok == theirs.num_experts_per_tok
        assert config.moe.moe_intermediate_size == theirs.moe_intermediate_size
        assert config.moe.mlp_only_layers == (0,)


@pytest.mark.parametrize("kind", ["lfm3", "laguna"])
def test_a_base_beside_those_of_each_kind_of_layer_changes_nothing(kind: str) -> None:
    bases = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    values = {"model_type": kind, "rope_parameters": bases, **(LAGUNA if kind == "laguna" else {})}
    theirs = CONFIGS[kind](**{name: each for name, each in values.items() if name != "model_type"}, rope_theta=123.0)
    assert [theirs.rope_parameters[name]["rope_theta"] for name in bases] == [5e5, 1e4]
    assert fold_from_hf(values | {"rope_theta": 123.0}, "it") == fold_from_hf(values, "it")


def test_layers_that_lack_heads_have_zeros_in_their_places(tmp_path: Path, tiny_checkpoint: Path) -> None:
    reference = save(tmp_path / "hf", tiny_checkpoint, *EXPERT_CASES["laguna"][:2])
    out = open_checkpoint(import_model(str(tmp_path / "hf"), tmp_path / "out"))
    assert out.config.num_attention_heads == 6
    theirs = reference.model.layers[3].self_attn  # four heads, two for each head of keys
    for name, dim, own in (("q_proj", 0, 16), ("o_proj", 1, 16), ("g_proj", 0, 1)):
        parts = out.get(f"model.layers.3.self_attn.{name}.weight").unflatten(dim, (2, 3, own))
        there, missing = parts.split([2, 1], dim + 1)
        assert not missing.any()
        if name != "q_proj":  # whose dimensions are in another order
            assert torch.equal(there.flatten(dim, dim + 2), theirs.get_submodule(name).weight)


def test_heads_of_another_count_than_the_file_says_are_refused(tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = EXPERT_CASES["laguna"]
    save(tmp_path / "hf", tiny_checkpoint, kind, changes)
    path = tmp_path / "hf" / "config.json"
    values = json.loads(path.read_text())
    for heads in ([2, 6, 6, 2], [4, 6, 6, 4], [2, 4, 6, 4]):
        path.write_text(json.dumps(values | {"num_attention_heads_per_layer": heads}))
        with pytest.raises(InputError, match=r"self_attn\.[qgo]_proj\.weight has the shape"):
            import_model(str(tmp_path / "hf"), tmp_path / "out")
    weights = tmp_path / "hf" / "model.safetensors"
    flat = load_file(weights)
    flat["model.layers.0.self_attn.o_proj.weight"] = flat["model.layers.0.self_attn.o_proj.weight"].flatten()
    save_file(flat, weights, {"format": "pt"})
    path.write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"layers\.0\.self_attn\.o_proj\.weight has the shape"):
        import_model(str(tmp_path / "hf"), tmp_path / "out")


@needs_extension
@pytest.mark.parametrize(("case", "bound"), [("laguna", 0.8), pytest.param("afmoe", 0.5, marks=pytest.mark.full)])
def test_four_bits(case: str, bound: float, tmp_path: Path, tiny_checkpoint: Path) -> None:
    kind, changes, _ = EXPERT_CASES[case]
    wide = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    }
    save(tmp_path / "hf", tiny_checkpoint, kind, changes | wide)
    folder = import_model(str(tmp_path / "hf"), tmp_path / "out")
    artifact = run_recipe(write_recipe(tmp_path, folder, tmp_path / "int4"), [*FOUR, "guard.perplexity_ratio=9"])
    verify_artifact(artifact)
    model, floating = load_model(artifact).model, load_model(folder).model
    assert fuse_decoder(model) is not None
    tokens = torch.arange(64).view(1, -1) * 5 % 320
    with torch.no_grad():
        expected = floating(tokens)
        error_T = (model(tokens) - expected).square().mean(-1).sqrt()
    assert float(error_T.median()) < bound * float(expected.std())  # for some a router chooses another expert
    assert type(model.get_submodule("model.layers.1.self_attn.g_proj")).__name__ == "Int4Linear"


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("afmoe", {"score_func": "softmax"}, "score_func='softmax' is not supported; 'sigmoid' is"),
        ("afmoe", {"route_norm": False}, "route_norm=False is not supported"),
        ("afmoe", {"num_expert_groups": 2}, "num_expert_groups=2 is not supported; 1 is"),
        ("afmoe", {"num_shared_experts": 0}, "num_shared_experts must be a positive whole number"),
        ("afmoe", {"global_attn_every_n_layers": "4"}, "must be a whole number"),
        ("afmoe", {"mup_enabled": 1}, "mup_enabled must be true or false"),
        ("afmoe", {"num_dense_layers": -1}, "num_dense_layers must be a whole number"),
        ("afmoe", {"moe_intermediate_size": 10**400}, "moe_intermediate_size must be a positive whole number"),
        ("afmoe", {"rope_scaling": {"rope_type": "odd"}}, "rotary scaling 'odd' is not supported"),
        ("laguna", {"gating": False}, "gating=False is not supported"),
        ("laguna", {"gating_types": ["per_element"] * 4}, r"gating_types=.* is not supported beside gating=True"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping=30.0 is not supported"),
        ("laguna", {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input=True is not"),
        ("laguna", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ("laguna", {"num_attention_heads_per_layer": [48]}, "must have a number for each of 4 layers"),
        ("laguna", {"num_attention_heads_per_layer": [48, 60, 64, 48]}, "no multiples of num_key_value_heads=8"),
        ("laguna", {"num_attention_heads_per_layer": [48, 64, 64, -8]}, "num_attention_heads must be a positive"),
        ("laguna", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "for each kind of layer"),
        (
            "laguna",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e4},
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                }
            },
            "partial_rotary_factor of sliding layers is not supported",
        ),
        ("laguna", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling=.* is not supported"),
        ("lfm3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling=.* is not supported"),
        ("lfm3", {"rope_parameters": {"sliding_attention": {}}, "rope_theta": 1e5}, "rope_theta must be a positive"),
        ("lfm3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}, "and no others"),
        ("lfm3", {"layer_types": ["conv"] * 24}, "a layer with attention is needed besides"),
        ("lfm3", {"layer_types": ["mamba"] * 24}, "layer_types must name conv, full_attention, sliding_attention"),
        ("lfm3", {"use_attention_gate": 1}, "use_attention_gate must be true or false"),
        ("lfm3", {"sliding_window": 0}, "sliding_window must be a positive whole number"),
    ],
)
def test_what_is_wrong_is_named(kind: str, changes: dict[str, Any], message: str) -> None:
    values = {"model_type": kind, **(LAGUNA if kind == "laguna" else {}), **changes}
    with pytest.raises(InputError, match=message):
        fold_from_hf(values, "it")
