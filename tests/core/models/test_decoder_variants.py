"""Mixture of experts, latent attention and shared layers, against transformers' classes and their saved checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.models.decoder import Decoder
from penjing.core.models.hf_config import decoder_config_from_hf, decoder_config_to_hf
from penjing.core.models.moe import MoE, watch_routing
from penjing.core.models.tensor_names import model_name, tensor_shapes
from penjing.core.runtime.batch_invariant import apply_batch_invariance
from tests.conftest import tiny_config
from tests.core.models.paged_decoder import Pages

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
ROUTED = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
V2, V3 = ROUTED | LATENT, ROUTED | LATENT | {"n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 11}),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"num_experts": 7, "shared_expert_intermediate_size": 36}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"num_experts": 7, "norm_topk_prob": True, "head_dim": 16}),
    "qwen3_moe_some": ("qwen3_moe", EXPERTS | {"num_experts": 5, "mlp_only_layers": [1], "head_dim": 16}),
    "dots1": ("dots1", ROUTED | {"routed_scaling_factor": 1.5, "norm_topk_prob": True, "head_dim": 12}),
    "deepseek_v2": ("deepseek_v2", V2 | {"routed_scaling_factor": 2.0}),
    "deepseek_v2_groups": (
        "deepseek_v2",
        V2 | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", V3),
    "deepseek_v3_yarn": ("deepseek_v3", V3 | {"rope_parameters": YARN, "rope_interleave": False, "q_lora_rank": None}),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family → (transformers' random model, ours loaded from the checkpoint that transformers saved)."""
    made: dict[str, tuple[Any, Decoder]] = {}

    def make(family: str) -> tuple[Any, Decoder]:
        if family not in made:
            kind, changes = FAMILIES[family]
            config = AutoConfig.for_model(kind, **(SMALL | changes))
            torch.manual_seed(0)
            reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            with torch.no_grad():
                for parameter in reference.parameters():
                    parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
                for name, buffer in reference.named_buffers():
                    if name.endswith("e_score_correction_bias"):
                        buffer.normal_(0.0, 0.1)
            folder = tmp_path_factory.mktemp(family)
            reference.save_pretrained(folder)
            made[family] = reference, load(folder)
        return made[family]

    return make


def load(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    model = Decoder(checkpoint.config).eval()
    stored = {name: checkpoint.get(name) for name in checkpoint.tensor_names}
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == tensor_shapes(checkpoint.config)
    model.load_state_dict(stored)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, SMALL["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def routings_of(reference: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(router logits, chosen experts) of each MoE layer of a transformers model."""
    seen: list[tuple[Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda _, inputs, output: seen.append((output[0], output[2])))
        for name, module in reference.named_modules()
        if "Router" in type(module).__name__
    ]
    reference(ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_transformers(build: Any, family: str) -> None:
    reference, model = build(family)
    ids = tokens(2, 61)
    expected, actual = reference(ids).logits, model(ids)
    assert expected.std() > 0.5
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()

    reference.zero_grad()
    model.zero_grad()
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        head, _, tail = name.partition(".experts.")
        if not tail:
            wanted = theirs[name.replace("shared_experts.", "shared_expert.") if "qwen2" in family else name]
        else:
            number, _, part = tail.partition(".")
            fused = "down_proj" if part.startswith("down") else "gate_up_proj"
            wanted = theirs[f"{head}.experts.{fused}"][int(number)]
            if fused == "gate_up_proj":
                wanted = wanted.chunk(2)[0 if part.startswith("gate") else 1]
        assert parameter.grad is not None, name
        assert (parameter.grad - wanted).abs().max() <= 1e-4 * wanted.abs().max().clamp(min=1e-2), name


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_routers_choose_as_transformers(build: Any, family: str) -> None:
    reference, model = build(family)
    ids = tokens(3, 40, seed=5)
    expected = routings_of(reference, ids)
    with watch_routing() as seen:
        model(ids)
    assert len(seen) == len(expected) == sum(isinstance(module, MoE) for module in model.modules())
    for ours, (_, chosen) in zip(seen, expected, strict=True):
        assert torch.equal(ours.experts.sort(-1).values, chosen.sort(-1).values)
        assert torch.equal(ours.load(), chosen.flatten().bincount(minlength=ours.load().shape[0]).float())


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_paged_steps_equal_transformers(build: Any, family: str) -> None:
    reference, model = build(family)
    ids = tokens(2, 40)
    expected = reference(ids).logits
    pages = Pages(model.config, 8, 16)
    blocks = [[3, 1, 4], [2, 6, 5]]
    done, outputs = [0, 0], [[], []]
    for step in ([30, 7], [1, 1], [0, 32], [9, 0]):
        rows = [row for row in range(2) if step[row]]
        logits = pages.run(model, [(ids[r, done[r] : done[r] + step[r]], done[r], blocks[r]) for r in rows])
        for row, part in zip(rows, logits.split([step[r] for r in rows]), strict=True):
            outputs[row].append(part)
            done[row] += step[row]
    for row in range(2):
        assert (torch.cat(outputs[row]) - expected[row]).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3"])
@torch.inference_mode()
def test_served_rows_are_bit_equal_in_any_batch(tmp_path: Path, build: Any, family: str) -> None:
    reference, _ = build(family)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    apply_batch_invariance(model)
    ids = tokens(9, 33)
    alone = Pages(model.config, 40, 16).run(model, [(ids[0], 0, [0, 1, 2])])
    together = Pages(model.config, 40, 16)
    batch = [(ids[row], 0, list(range(4 * row, 4 * row + 3))) for row in range(9)]
    assert torch.equal(together.run(model, batch)[:33], alone)
    chunks, start = Pages(model.config, 40, 16), 0
    for size in (1, 2, 17, 13):
        part = chunks.run(model, [(ids[0, start : start + size], start, [7, 5, 6])])
        assert torch.equal(part, alone[start : start + size])
        start += size


def test_config_is_written_back_as_transformers_reads_it(tmp_path: Path, build: Any) -> None:
    for family in FAMILIES:
        reference, model = build(family)
        written = decoder_config_to_hf(model.config)
        assert decoder_config_from_hf(written, family) == model.config, family
        again = AutoConfig.for_model(**written)
        theirs = reference.config.to_dict()
        # what penjing has no use for; head_dim is stated always
        ignored = {"output_router_logits", "architectures", "dtype", "head_dim", "sliding_window", "layer_types"}
        ignored |= {"max_window_layers", "transformers_version", "attention_dropout", "_name_or_path", "num_experts"}
        for key, value in again.to_dict().items():
            if key in theirs and key not in ignored:
                assert theirs[key] == value or (theirs[key] is None and value in (1, "default")), (family, key)


@torch.inference_mode()
def test_shared_layers_are_one_set_of_weights_and_each_has_its_own_cache() -> None:
    config = tiny_config(num_hidden_layers=4, shared_layers=3, model_type="penjing")
    torch.manual_seed(0)
    model = Decoder(config)
    layers = {name.split(".")[2] for name, _ in model.named_parameters() if ".layers." in name}
    assert layers == {"0", "3"}
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == tensor_shapes(config)
    plain = Decoder(config.model_copy(update={"shared_layers": 1}))
    state = model.state_dict()
    plain.load_state_dict(state)  # it holds every layer by name
    ids = tokens(1, 40)
    assert torch.equal(model(ids), plain(ids))
    pages = Pages(config, 8, 16)
    steps = [pages.run(model, [(ids[0, start:end], start, [2, 0, 5])]) for start, end in ((0, 17), (17, 18), (18, 40))]
    assert (torch.cat(steps) - model(ids)[0]).abs().max() <= 1e-5 * model(ids).abs().max()


def test_stored_names_go_both_ways() -> None:
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    config = tiny_config(model_type="mixtral", moe=moe)
    assert model_name(config, "model.layers.1.block_sparse_moe.experts.1.w2.weight") == (
        "model.layers.1.mlp.experts.1.down_proj.weight"
    )
