"""INT8 of decoders with experts: calibrated expert by expert, loaded by the engine, compared with the float network."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.lifecycle.forward import dequantize

from penjing.compress.decoder.layer import compress_layer, fill_up
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.export.compressed_tensors import LOADER
from penjing.compress.run import run_recipe
from penjing.core.artifact.decoder import open_decoder_artifact
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.cli import _run
from penjing.core.errors import InputError
from penjing.core.models.decoder import Decoder
from penjing.core.models.mlp import MLP
from penjing.core.runtime.quantized import Int8Linear
from tests.compress.conftest import Notes, write_recipe
from tests.compress.decoder.test_transforms import TRANSFORMS, transformed

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "intermediate_size": 48, "moe": EXPERTS},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "attention_bias": True,
        "moe": EXPERTS | {"norm_topk_prob": False, "shared_expert_intermediate_size": 64, "shared_expert_gate": True},
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "qk_norm": True, "moe": EXPERTS | {"mlp_only_layers": [1]}},
    "parallel": {
        "model_type": "penjing",
        "parallel": True,
        "layer_rotary": ("none", "main"),
        "moe": EXPERTS | {"router_bias": True, "shared_expert_intermediate_size": 64},
    },
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "qwen2_moe" else pytest.mark.full) for kind in KINDS]
)
def test_an_artifact_with_experts_answers_as_the_float_network(
    kind: str, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path], notes: Notes
) -> None:
    source = make_tiny_checkpoint(**KINDS[kind])
    out = run_recipe(write_recipe(tmp_path, source, tmp_path / "int8"), progress=notes)
    tokens = torch.arange(64).view(1, -1) * 5 % 320
    loaded = load_model(out)
    with torch.no_grad():
        floating, rounded = load_model(source).model(tokens), loaded.model(tokens)
    # INT8 and the few tokens whose experts change with it; another order of experts or scales is at 1.4
    assert (floating - rounded).square().mean().sqrt() < 0.25 * floating.std()
    modules = dict(loaded.model.named_modules())
    for expert in range(8):
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert isinstance(modules[f"model.layers.0.mlp.experts.{expert}.{part}"], Int8Linear)
    assert not isinstance(modules["model.layers.0.mlp.gate"], Int8Linear)
    assert "re:.*[.]gate$" in open_checkpoint(out).config_json["quantization_config"]["ignore"]
    assert open_decoder_artifact(out).parity.differences
    said = [line for line in notes.lines if "experts saw fewer than" in line]
    assert len(said) == 1
    few, total = map(int, re.findall(r"\d+", said[0])[:2])  # 256 tokens, two of eight experts each: 64 in the mean
    assert total // 2 < few <= total == (8 if kind == "qwen3_moe" else 16)


def test_compressed_tensors_takes_the_same_layers(tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]) -> None:
    """Its own rules choose each expert's linear layers and no router, and its arithmetic gives the same weights."""
    source = make_tiny_checkpoint(**KINDS["qwen2_moe"])
    out = run_recipe(write_recipe(tmp_path, source, tmp_path / "int8"))
    assert _run(["export", str(out), str(tmp_path / "export"), "--to", "compressed-tensors"]) == 0
    assert "joins the experts" in json.loads((tmp_path / "export" / "export.json").read_text())["unmeasured"][LOADER]
    checkpoint = open_checkpoint(tmp_path / "export")
    model = Decoder(checkpoint.config)
    apply_quantization_config(model, QuantizationConfig.model_validate(checkpoint.quantization))
    chosen = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    stored = {name.removesuffix(".weight_scale") for name in checkpoint.tensor_names if name.endswith("weight_scale")}
    assert {name for name in chosen if "mlp" in name or "attn" in name} | {"lm_head"} == stored
    assert "model.layers.0.mlp.experts.7.down_proj" in stored
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    ours = dict(LayerStream(checkpoint).weights(1))["mlp.experts.3.up_proj.weight"]
    scheme: Any = model.get_submodule(name.removesuffix(".weight")).quantization_scheme
    theirs = dequantize(checkpoint.get(name), checkpoint.get(f"{name}_scale"), args=scheme.weights)
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in TRANSFORMS if name != "hadamard"])
def test_what_is_absorbed_changes_no_answer(kind: str, name: str, make_tiny_checkpoint: Callable[..., Path]) -> None:
    before, after, token_ids = transformed(make_tiny_checkpoint(**KINDS[kind]), TRANSFORMS[name])
    with torch.no_grad():
        torch.testing.assert_close(after(token_ids), before(token_ids), rtol=0, atol=2e-3)


def test_an_expert_that_no_token_reaches_is_calibrated_on_all(make_tiny_checkpoint: Callable[..., Path]) -> None:
    source = make_tiny_checkpoint(**KINDS["mixtral"])
    stream = LayerStream(open_checkpoint(source))
    hidden = stream.embed(torch.full((1, 4), 7))  # one token four times: two of eight experts
    compressed = compress_layer(stream, 0, Int8Settings(), None, hidden)
    assert sorted(compressed.few) == list(range(8))
    assert sum(rows == 0 for rows in compressed.few.values()) == 6
    for expert in range(8):
        weight = compressed.tensors[f"mlp.experts.{expert}.down_proj.weight"]
        assert weight.dtype == torch.int8
        assert compressed.errors[f"mlp.experts.{expert}.down_proj"].output < 0.05


@pytest.mark.parametrize(
    "steps",
    [
        'kind = "prune"\nratio = 0.5',
        'kind = "finetune"\nsteps = 1\nsources = ["builtin:code"]',
        'kind = "quantize"\nsteps = 1',
    ],
)
def test_steps_that_know_no_experts_refuse_them(
    steps: str, tmp_path: Path, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    recipe = write_recipe(tmp_path, make_tiny_checkpoint(**KINDS["mixtral"]), tmp_path / "out")
    recipe.write_text(recipe.read_text().replace('kind = "quantize"', steps))
    with pytest.raises(InputError, match=r"has experts \(moe\), which"):
        run_recipe(recipe)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_few_tokens_are_filled_up_with_what_the_expert_itself_would_give(
    activation: Any, make_tiny_checkpoint: Callable[..., Path]
) -> None:
    """Also where its gate has another activation, and its layers have biases."""
    config = open_checkpoint(make_tiny_checkpoint(**KINDS["mixtral"])).config
    assert config.moe is not None
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"activation": activation})})
    torch.manual_seed(0)
    expert = MLP(config.hidden_size, 12, bias=True, activation=activation)
    weights = {f"mlp.experts.0.{name}": value.detach() * 4 for name, value in expert.named_parameters()}
    expert.load_state_dict({name.removeprefix("mlp.experts.0."): value for name, value in weights.items()})
    read: list[torch.Tensor] = []
    expert.down_proj.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    x_MK = torch.randn(5, config.hidden_size)
    expert(x_MK)
    samples = {"mlp.gate": x_MK}
    assert fill_up(samples, weights, config) == {0: 0}
    torch.testing.assert_close(samples["mlp.experts.0.down_proj"], read[0])
