"""transformers with compressed-tensors, neither of them ours, reads the artifact to the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from torch import nn
from transformers import AutoModelForCausalLM

from penjing.compress.decoder.parity import fake_quantized_logits
from penjing.compress.decoder.stream import LayerStream
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.load import load_model
from penjing.core.models.decoder import Decoder
from penjing.kernels.quantize import quantize_above
from tests.core.artifact.int8_artifact import above_zero_points, quantization_config, write_int8_artifact


def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def token_ids(folder: Path, rows: int, columns: int) -> torch.Tensor:
    vocab_size = open_checkpoint(folder).config.vocab_size
    return torch.randint(3, vocab_size, (rows, columns), generator=torch.Generator().manual_seed(5))


def dequantized(folder: Path) -> Decoder:
    """The artifact in float32, activations not quantized."""
    stream = LayerStream(open_checkpoint(folder))
    model = Decoder(stream.config)
    tensors = {
        f"model.layers.{layer}.{name}": tensor
        for layer in range(stream.config.num_hidden_layers)
        for name, tensor in stream.weights(layer).items()
    }
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        tensors[name] = stream.stored(name).float()
    tensors["lm_head.weight"] = stream.stored("lm_head.weight").float() * stream.stored("lm_head.weight_scale")
    model.load_state_dict(tensors)
    return model


def switch_activation_quantization_off(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None  # pyright: ignore


@pytest.mark.timeout(900)  # whoever comes first compresses SmolLM2, on one core
@pytest.mark.parametrize("fixture", ["tiny_int8", pytest.param("smollm2_int8", marks=pytest.mark.full)])
def test_weights_and_logits_without_activation_quantization_are_equal(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    theirs, ours = oracle(folder), dequantized(folder)
    assert all(layer.weight.dtype == torch.int8 for layer in theirs.modules() if isinstance(layer, nn.Linear))
    switch_activation_quantization_off(theirs)
    ids = token_ids(folder, 1, 24)
    with torch.no_grad():
        wanted, found = theirs(ids).logits, ours(ids)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name).float()), name
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()


def test_logits_with_activation_quantization_agree_as_far_as_the_two_rules_do(
    tiny_int8: Path, tiny_checkpoint: Path
) -> None:
    # compressed-tensors divides by amax / 127.5 and may reach −128, the INT8 kernels by amax / 127: another rounding of
    # each activation, so the distance is that of two INT8 models, and both must be as near to the float model.
    ids = token_ids(tiny_int8, 4, 32)
    theirs, ours, exact = oracle(tiny_int8), load_model(tiny_int8).model, load_model(tiny_checkpoint).model
    with torch.no_grad():
        wanted, found, truth = theirs(ids).logits, ours(ids), exact(ids)

    def distance(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one - other).square().mean().sqrt() / truth.std())

    assert distance(found, truth) < 1.2 * distance(wanted, truth)
    assert distance(found, wanted) < 0.1


def test_the_int8_runtime_equals_the_fake_quantized_model(tiny_int8: Path) -> None:
    ids = token_ids(tiny_int8, 2, 32)
    with torch.no_grad():
        runtime = load_model(tiny_int8).model(ids)
    fake = fake_quantized_logits(open_checkpoint(tiny_int8), ids)
    gaps = (runtime - fake).abs()
    # Almost all rows to float32 rounding; where one activation sits on a rounding edge a token may differ by a step.
    assert gaps.median() < 1e-5
    assert gaps.mean() < 0.02 * runtime.std()


def test_blocks_above_zero_points_are_groups_of_compressed_tensors() -> None:
    x = torch.randn(7, 768, generator=torch.Generator().manual_seed(1)).exp() - 1
    x[:, 300] *= 40
    form = {"num_bits": 8, "symmetric": False, "dynamic": True, "strategy": "group", "group_size": 256}
    args = QuantizationArgs.model_validate(form)
    scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Module())
    q, own_scale, own_zero = quantize_above(x)
    torch.testing.assert_close(own_scale, scale.view(7, 3), rtol=1e-6, atol=0)
    # Rounding edges aside: both divide in float32, by a scale that may be a last bit apart.
    assert (own_zero - zero.view(7, 3)).abs().max() <= 1
    wanted = quantize(x, scale, zero, args)
    assert ((q - wanted).abs() <= 1).all()
    assert (q == wanted).float().mean() > 0.999


def test_zero_points_are_those_of_compressed_tensors(tiny_checkpoint: Path, tmp_path: Path) -> None:
    groups = above_zero_points("re:.*_proj")  # every layer's: their rule of dividing is ours then
    quantization = quantization_config(["lm_head"], config_groups=groups)
    folder = write_int8_artifact(tiny_checkpoint, tmp_path / "above", quantization=quantization)
    ids = token_ids(folder, 4, 32)
    with torch.no_grad():
        wanted, found = oracle(folder)(ids).logits, load_model(folder).model(ids)
    assert (found - wanted).abs().median() < 1e-4 * wanted.std()  # the rest sits on rounding edges
    assert (found - wanted).abs().mean() < 0.02 * wanted.std()
