"""INT8 layers beside compressed-tensors' own arithmetic, and the reading of its quantization_config."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils import match_named_modules
from torch import nn

from penjing.core.errors import InputError
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.quantized import Int8Linear, apply_quantized
from penjing.core.runtime.schemes import INT8, quantized_modules
from tests.conftest import tiny_config
from tests.core.artifact.int8_artifact import quantization_config, quantize_channels


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("leading", [(7,), (2, 5), (1, 1, 3)])
def test_layer_equals_the_fake_quantized_one(leading: tuple[int, ...], bias: bool) -> None:
    weight, scale = quantize_channels(draw(40, 96, seed=1))
    bias_N = draw(40, seed=2) if bias else None
    x = draw(*leading, 96, seed=3) * 2
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy=QuantizationStrategy.TOKEN, dynamic=True)
    # Our scales in its rounding: it divides by 127.5, where a symmetric grid of ±127 divides by 127.
    x_scale = x.abs().amax(-1, keepdim=True) / 127
    x_fake = fake_quantize(x, x_scale, torch.zeros_like(x_scale, dtype=torch.int8), args)
    expected = nn.functional.linear(x_fake, weight.float() * scale, bias_N)
    y = Int8Linear(weight, scale, bias_N)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_activation_scales_are_within_half_a_percent_of_compressed_tensors() -> None:
    x = draw(9, 64, seed=4)
    args = QuantizationArgs(num_bits=8, symmetric=True, strategy=QuantizationStrategy.TOKEN, dynamic=True)
    theirs, _ = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
    ours = x.abs().amax(-1, keepdim=True) / 127
    assert ((ours - theirs).abs() / theirs).max() < 0.005


def test_no_tokens() -> None:
    weight, scale = quantize_channels(draw(4, 8))
    assert Int8Linear(weight, scale)(torch.empty(2, 0, 8)).shape == (2, 0, 4)


def linear_names(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize(
    ("targets", "ignore"),
    [
        (["Linear"], ["lm_head"]),
        (["Linear"], []),
        (["Linear"], ["re:.*down_proj$", "model.layers.0.self_attn.q_proj"]),
        (["re:.*self_attn.*"], []),
        (["re:model.layers.1", "model.layers.0.mlp.up_proj"], ["re:.*mlp.gate_proj"]),
        (["re:layers.1"], []),
        (["model.layers.0"], []),
        (["Embedding"], []),
    ],
)
def test_targets_are_matched_as_compressed_tensors_does(targets: list[str], ignore: list[str]) -> None:
    with torch.device("meta"):
        model = Decoder(tiny_config(tie_word_embeddings=False))
    config = quantization_config(ignore)
    config["config_groups"]["group_0"]["targets"] = targets
    matched = [name for name, layer in match_named_modules(model, targets, ignore) if isinstance(layer, nn.Linear)]
    assert quantized_modules(config, linear_names(model)) == dict.fromkeys(matched, INT8)


def replaced(path: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(quantization_config(["lm_head"]))
    *sections, name = path.split(".")
    owner = config
    for section in sections:
        owner = owner[section]
    owner[name] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quant_method", "gptq", "'gptq'"),
        ("quant_method", None, "None"),
        ("format", "marlin-24", "marlin-24.*pack-quantized"),
        ("format", "pack-quantized", "num_bits is 8.*runs 4"),
        ("format", "mixed-precision", "group_0.format is 'mixed-precision'"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        ("config_groups.group_0.weights", None, "weights is missing"),
        ("config_groups.group_0.weights.num_bits", 4, "num_bits is 4"),
        ("config_groups.group_0.weights.strategy", "group", "'group'"),
        ("config_groups.group_0.weights.symmetric", False, "symmetric is False"),
        ("config_groups.group_0.weights.type", "float", "'float'"),
        ("config_groups.group_0.input_activations", None, "input_activations is missing"),
        ("config_groups.group_0.input_activations.dynamic", False, "dynamic is False"),
        ("config_groups.group_0.input_activations.strategy", "tensor", "'tensor'"),
        ("config_groups.group_0.output_activations", {"num_bits": 8}, "output_activations"),
        ("config_groups.group_0", "Linear", "group_0"),
        ("config_groups", ["Linear"], "config_groups"),
        ("config_groups", {}, "config_groups"),
        ("config_groups.group_0.targets", "Linear", "targets"),
        ("config_groups.group_0.targets", ["re:("], r"re:\("),
        ("ignore", "lm_head", "ignore"),
    ],
)
def test_other_schemes_are_refused_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantized_modules(replaced(path, value), ["model.layers.0.mlp.up_proj"])


def test_apply_refuses_what_does_not_fit() -> None:
    model = Decoder(tiny_config())
    weight, scale = quantize_channels(draw(96, 64))
    name = "model.layers.0.mlp.up_proj"
    with pytest.raises(InputError, match=r"up_proj.weight has shape \(96, 32\).*\(96, 64\)"):
        apply_quantized(
            model, {name: INT8}, {f"{name}.weight": weight[:, :32], f"{name}.weight_scale": scale}.__getitem__
        )
    with pytest.raises(InputError, match="up_proj: scale_N"):
        apply_quantized(model, {name: INT8}, {f"{name}.weight": weight, f"{name}.weight_scale": scale[:5]}.__getitem__)
    with pytest.raises(InputError, match="int8"):
        apply_quantized(
            model, {name: INT8}, {f"{name}.weight": weight.float(), f"{name}.weight_scale": scale}.__getitem__
        )
    with pytest.raises(InputError, match="RMSNorm"):
        apply_quantized(model, {"model.norm": INT8}, {}.__getitem__)
    assert isinstance(model.get_submodule(name), nn.Linear)
