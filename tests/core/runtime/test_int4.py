"""4-bit layers beside compressed-tensors' own arithmetic, and what a checkpoint with them may not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize, fake_quantize
from torch import Tensor, nn

from penjing.core.checkpoint.load import load_model
from penjing.core.errors import InputError
from penjing.core.runtime.quantized import Int4Linear, Int8Linear, dequantized
from penjing.core.runtime.schemes import INT8, Scheme, quantized_modules
from tests.core.artifact.int4_artifact import GROUP, quantization_config, write_int4_artifact

UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_of_their_tensors_equals_their_fake_quantized_one(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-8, 8, (40, 96), dtype=torch.int8, generator=generator)
    scale = (torch.rand(40, 3, generator=generator) * 0.01 + 0.001).to(dtype)
    x = torch.randn(7, 96, generator=generator) * 2
    four = QuantizationArgs(num_bits=4, symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=GROUP)
    token = QuantizationArgs(num_bits=8, symmetric=True, strategy=QuantizationStrategy.TOKEN, dynamic=True)
    weight = dequantize(integers, scale.float(), args=four)
    x_scale = x.abs().amax(-1, keepdim=True) / 127
    x_fake = fake_quantize(x, x_scale, torch.zeros_like(x_scale, dtype=torch.int8), token)
    y = Int4Linear(pack_to_int32(integers, 4), scale)(x)
    torch.testing.assert_close(y, nn.functional.linear(x_fake, weight), rtol=1e-5, atol=1e-5)
    tensors = {"x.weight_packed": pack_to_int32(integers, 4), "x.weight_scale": scale}
    assert torch.equal(dequantized("x", Scheme(4, GROUP), tensors.__getitem__), weight)


def test_a_name_counts_before_a_class() -> None:
    names = [UP, "model.layers.0.mlp.down_proj", "lm_head"]
    four = Scheme(4, GROUP)
    assert quantized_modules(quantization_config([]), names) == {names[0]: four, names[1]: four}
    assert quantized_modules(quantization_config(["re:.*down_proj$"]), names) == {names[0]: four, names[1]: INT8}


def test_a_mixed_checkpoint_loads(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    source = make_tiny_checkpoint()
    folder = write_int4_artifact(source, tmp_path / "mixed", eight=("down_proj",))
    loaded = load_model(folder)
    assert loaded.scheme == "int4"
    assert isinstance(loaded.model.get_submodule("model.layers.1.mlp.down_proj"), Int8Linear)
    assert isinstance(loaded.model.get_submodule(UP), Int4Linear)
    ids = torch.randint(0, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = load_model(source).model(ids), loaded.model(ids)
    assert (found - wanted).square().mean().sqrt() < 0.5 * wanted.std()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("group_size", 48, "group_size is 48.*multiples of 32"),
        ("group_size", None, "group_size is None"),
        ("actorder", "group", "actorder is 'group'"),
        ("symmetric", False, "symmetric is False"),
        ("num_bits", 3, "num_bits is 3.*runs 4"),
        ("strategy", "channel", "strategy is 'channel'"),
    ],
)
def test_other_layouts_are_refused_by_name(field: str, value: Any, message: str) -> None:
    config = quantization_config([])
    config["config_groups"]["group_0"]["weights"][field] = value
    with pytest.raises(InputError, match=message):
        quantized_modules(config, [UP])


def test_without_input_activations_they_are_bfloat16(make_tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = quantization_config([])
    config["config_groups"]["group_0"]["input_activations"] = None
    assert quantized_modules(config, [UP]) == {UP: Scheme(4, GROUP, activation_bits=16)}
    folder = write_int4_artifact(make_tiny_checkpoint(), tmp_path / "half", quantization=config)
    layer = load_model(folder).model.get_submodule(UP)
    assert isinstance(layer, Int4Linear)
    x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1))
    expected = x.bfloat16().double() @ layer.packed.dequantize().double().t()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)


def test_weights_alone_in_8_bits_are_another_computation() -> None:
    config = quantization_config(["re:.*"])
    config["config_groups"]["group_1"]["input_activations"] = None
    with pytest.raises(InputError, match="input_activations is missing: penjing runs W8A8, W4A8 and W4A16"):
        quantized_modules(config, [UP])


@pytest.mark.parametrize(
    ("ending", "change", "message"),
    [
        ("weight_scale", lambda t: torch.full_like(t, torch.inf), "overflowed"),
        ("weight_scale", lambda t: t[:, :1], r"64 inputs, config.json says 32"),
        ("weight_packed", lambda t: t.to(torch.int64), "int32"),
        ("weight_packed", lambda t: t[:, :4], "config.json asks for|weight_shape says|groups"),
        ("weight_shape", lambda t: t + 1, "weight_shape says"),
        ("weight_packed", lambda t: None, "weight_packed is missing"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    make_tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    ending: str,
    change: Callable[[Tensor], Tensor | None],
    message: str,
) -> None:
    def damage(name: str, tensor: Tensor) -> Tensor | None:
        return change(tensor) if name == f"{UP}.{ending}" else tensor

    folder = write_int4_artifact(make_tiny_checkpoint(), tmp_path / "damaged", change=damage)
    with pytest.raises(InputError, match=message):
        load_model(folder)
