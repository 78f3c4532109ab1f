"""Decoders with experts in one call of the C++ extension: logits of the layers one by one, whatever shares the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penjing.core.checkpoint.load import load_model
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.fused import fuse_decoder, why_not_fused
from penjing.kernels.decoder_step import DecoderStep
from penjing.kernels.dispatch import force_torch
from tests.core.artifact.int4_artifact import quantization_config as int4_config
from tests.core.artifact.int4_artifact import write_int4_artifact
from tests.core.artifact.int8_artifact import quantization_config, write_int8_artifact
from tests.core.models.paged_decoder import Pages
from tests.core.runtime.test_fused import BLOCK_SIZE, draw_ids, fused_step
from tests.kernels.cpu import needs_extension, the_extension

pytestmark = needs_extension
KEPT = ["lm_head", "re:.*[.]gate$", "re:.*[.]shared_expert_gate$"]
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "intermediate_size": 64, "moe": EXPERTS},
    "qwen3": {
        "model_type": "qwen3_moe",
        "qk_norm": True,
        "moe": EXPERTS | {"mlp_only_layers": [1], "norm_topk_prob": False},
    },
    "sigmoid": {"model_type": "penjing", "moe": EXPERTS | {"scoring_func": "sigmoid", "router_bias": True}},
    "sparsemixer": {
        "model_type": "penjing",
        "moe": {
            **EXPERTS,
            "num_experts_per_tok": 2,
            "scoring_func": "sparsemixer",
            "router_jitter_noise": 0.2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "biases": True,
        },
    },
    "logits": {
        "model_type": "penjing",
        "moe": EXPERTS | {"scoring_func": "sigmoid", "router_bias": True, "router_bias_of": "logits"},
    },
    "every": {"model_type": "penjing", "moe": EXPERTS | {"num_experts_per_tok": 8}},
    "shared": {"model_type": "penjing", "moe": EXPERTS | {"shared_expert_intermediate_size": 64}},
    "gemma4": {
        "model_type": "penjing",
        "norms": "around",
        "value_norm": True,
        "layer_scales": True,
        "logit_cap": 2.0,
        "moe": EXPERTS | {"shared_expert_intermediate_size": 128, "activation": "gelu_tanh", "output_norms": True},
    },
    "norms apart": {
        "model_type": "penjing",
        "moe": EXPERTS | {"shared_expert_intermediate_size": 64, "output_norms": True},
    },
    "wide": {"model_type": "penjing", "moe": EXPERTS | {"shared_expert_intermediate_size": 128, "router_bias": True}},
    "qwen2": {
        "model_type": "qwen2_moe",
        "attention_bias": True,
        "moe": EXPERTS | {"shared_expert_intermediate_size": 128, "shared_expert_gate": True, "norm_topk_prob": False},
    },
    "after": {"model_type": "penjing", "norms": "after", "qk_norm": True, "qk_norm_over": "all", "moe": EXPERTS},
    "around": {
        "model_type": "penjing",
        "norms": "around",
        "moe": EXPERTS | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    },
    "parallel": {
        "model_type": "penjing",
        "parallel": True,
        "layer_rotary": ("main", "none"),
        "moe": EXPERTS | {"scoring_func": "sigmoid", "shared_expert_intermediate_size": 192},
    },
    "biased": {"model_type": "penjing", "moe": EXPERTS | {"router_bias": True, "norm_topk_prob": False}},
    "gpt_oss": {
        "model_type": "penjing",
        "attention_sinks": True,
        "sliding_window": 20,
        "layer_types": ("sliding_attention", "full_attention"),
        "moe": EXPERTS | {"biases": True, "activation": "clamped_swiglu", "routed_scaling_factor": 1.5},
    },
}


def make(make_tiny_checkpoint: Callable[..., Path], folder: Path, kind: str, scheme: str) -> Decoder:
    checkpoint = make_tiny_checkpoint(**KINDS[kind])
    if scheme == "int8":
        checkpoint = write_int8_artifact(checkpoint, folder / "int8", quantization=quantization_config(KEPT))
    if scheme == "int4":
        quantization = int4_config([]) | {"ignore": KEPT}
        write_int4_artifact(checkpoint, folder / "int4", quantization=quantization)
        checkpoint = folder / "int4"
    return load_model(checkpoint).model


def fuse(model: Decoder) -> DecoderStep:
    step = fuse_decoder(model)
    assert step is not None
    return step


def logits(step: DecoderStep, model: Decoder, ids: Tensor, *sizes: int) -> Tensor:
    """Of a text that comes in steps of so many tokens."""
    pages, made, past = Pages(model.config, 40, BLOCK_SIZE), list[Tensor](), 0
    for size in sizes:
        made.append(fused_step(step, pages, [(ids[past : past + size], past, list(range(20)))]))
        past += size
    return torch.cat(made)


@pytest.mark.parametrize(("scheme", "bound"), [("fp32", 1e-5), ("int8", 5e-3), ("int4", 5e-3)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_the_layers_one_by_one(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str, scheme: str, bound: float
) -> None:
    model = make(make_tiny_checkpoint, tmp_path, kind, scheme)
    ids = draw_ids(90, 1)
    found = logits(fuse(model), model, ids, 60, 29, 1)
    with torch.inference_mode():
        expected = model(ids)
    # Where a sum in another order moves a rounded input by a step, what depends on it differs.
    assert float((found - expected).abs().mean()) < bound * float(expected.std())


@pytest.mark.parametrize("scheme", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_what_shares_the_step(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path, kind: str, scheme: str
) -> None:
    """Neither on how a text is cut, nor on threads; 270 rows are more than go to experts together."""
    model = make(make_tiny_checkpoint, tmp_path, kind, scheme)
    step, ids, extension = fuse(model), draw_ids(300, 2), the_extension()
    whole = logits(step, model, ids, 300)
    assert torch.equal(logits(step, model, ids, 270, 9, 8, 8, 4, 1), whole)
    threads = extension.num_threads
    try:
        for count in (1, 2, 5):  # the last is more than some experts have panels
            extension.set_num_threads(count)
            assert torch.equal(logits(step, model, ids, 290, 9, 1), whole), count
    finally:
        extension.set_num_threads(threads)
    pages = Pages(model.config, 40, BLOCK_SIZE)
    fused_step(step, pages, [(ids[:299], 0, list(range(20)))])
    others = [(draw_ids(5, seed), 0, [20 + seed]) for seed in range(3)]
    assert torch.equal(fused_step(step, pages, [*others, (ids[299:], 299, list(range(20)))])[-1], whole[-1])


def test_experts_that_are_stored_unlike_stay_on_torch(
    make_tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As a search of bits may leave them; rows of each would lie otherwise in the step's memory."""
    checkpoint = make_tiny_checkpoint(**KINDS["mixtral"])
    eight = ("experts.3.down_proj", "experts.3.gate_proj", "experts.3.up_proj")
    quantization = int4_config([f"re:.*{name}$" for name in eight]) | {"ignore": KEPT}
    write_int4_artifact(checkpoint, tmp_path / "mixed", eight=eight, quantization=quantization)
    model = load_model(tmp_path / "mixed").model
    assert why_not_fused(model) == "experts of model.layers.0.mlp are stored in different forms"
    assert fuse_decoder(model) is None


def test_what_experts_have_that_the_step_does_not_know(make_tiny_checkpoint: Callable[..., Path]) -> None:
    def why(**changes: Any) -> str | None:
        kind = {"model_type": "penjing", "moe": EXPERTS | changes}
        return why_not_fused(load_model(make_tiny_checkpoint(**kind)).model)

    assert why() is None
    assert why(shared_expert_intermediate_size=64) is None
    assert why(shared_expert_intermediate_size=128, shared_expert_gate=True) is None
    assert why(shared_expert_intermediate_size=32) == "the MLP that all tokens take is narrower than an expert"
    clamped = why(shared_expert_intermediate_size=64, activation="clamped_swiglu")
    assert clamped == "what all tokens take has an activation of its own"
    biased = why(shared_expert_intermediate_size=64, shared_expert_gate=True, biases=True)
    assert biased == "the router has biases beside a gate of what all tokens take"
    assert why(n_group=2, topk_group=2) == "its experts stand in groups"
    mixed = {"scoring_func": "sparsemixer", "num_experts_per_tok": 2, "norm_topk_prob": False}
    assert why(**mixed) is None
    beside = why(shared_expert_intermediate_size=64, **mixed)
    assert beside == "all tokens take something beside experts of sparsemixer"
    with force_torch():
        assert why() is not None
