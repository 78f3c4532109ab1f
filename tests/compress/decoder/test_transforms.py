"""Rotation and smoothing change the weights and not the function, for every architecture; and they help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penjing.compress.decoder.check import transformed as network_after
from penjing.compress.decoder.head import compress_embedding, compress_head, embed_for_calibration, unties
from penjing.compress.decoder.layer import Rotations, compress_layer
from penjing.compress.decoder.rotate import rotation_matrix
from penjing.compress.decoder.settings import Int8Settings
from penjing.compress.decoder.smooth import channel_magnitude, smoothing_scale
from penjing.compress.decoder.stream import LayerStream
from penjing.compress.decoder.weights import fake_quantize_activation
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.models.decoder import Decoder
from penjing.kernels.hadamard import hadamard

ARCHITECTURES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "attention_bias": True},
    "qwen3": {"model_type": "qwen3", "qk_norm": True},
    "sliding window, one key head": {"model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 1},
    "inner norms": {"model_type": "penjing", "inner_norms": True, "activation": "relu2", "num_key_value_heads": 1},
    "convolutions": {
        "model_type": "penjing",
        "layer_types": ("full_attention", "short_conv"),
        "conv_taps": 3,
        "conv_bias": True,
    },
    "gates of heads": {"model_type": "penjing", "attention_gate": "head", "attention_gate_function": "softplus"},
    "gates of channels": {"model_type": "penjing", "attention_gate": "channel", "attention_bias": True},
    "odd sizes": {"hidden_size": 60, "intermediate_size": 75, "num_attention_heads": 3, "num_key_value_heads": 3},
}
TRANSFORMS = {
    "rotate": {"rotate": True, "smooth_norm": 0, "smooth_down": 0, "smooth_output": 0},
    "smooth": {"rotate": False, "smooth_norm": 0.5, "smooth_down": 0.5, "smooth_output": 0.5},
    "all": {"rotate": True, "smooth_norm": 0.7, "smooth_down": 0.6, "smooth_output": 0.6},
    "hadamard": {"rotate": True, "smooth_down": 0.6, "smooth_output": 0.6, "hadamard_down": 32},
    "turned": {"rotate": False, "smooth_norm": 0.5, "smooth_down": 0, "smooth_output": 0, "hadamard_table": 4},
    "turned twice": {"rotate": True, "smooth_norm": 0, "smooth_down": 0, "smooth_output": 0, "hadamard_table": 4},
    "signs": {"rotate": False, "smooth_norm": 0.5, "smooth_down": 0.5, "smooth_output": 0.5, "search_steps": 20},
}


def transformed(
    folder: Path, transform: dict[str, object], zero_points: tuple[str, ...] = ()
) -> tuple[Decoder, Decoder, torch.Tensor]:
    """The model before and after the transforms with nothing quantized, and token ids."""
    stream = LayerStream(open_checkpoint(folder))
    config = stream.config
    settings = Int8Settings.model_validate(
        {
            "transform": transform,
            "keep": ["*"],
            "lm_head": "keep",
            "embedding_dtype": "float32",
            "zero_points": zero_points,
        }
    )
    token_ids = torch.randint(0, config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(3))
    rotations = Rotations.of(settings, config.hidden_size, config.head_dim)
    hidden = embed_for_calibration(stream, rotations, token_ids)
    tensors = compress_embedding(stream, settings, rotations)
    for layer in range(config.num_hidden_layers):
        compressed = compress_layer(stream, layer, settings, rotations, hidden)
        assert not compressed.errors
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in compressed.tensors.items()}
    tensors |= compress_head(stream, settings, rotations, hidden.flatten(0, 1)).tensors
    before = Decoder(config)
    names = stream.checkpoint.tensor_names
    before.load_state_dict({name: stream.checkpoint.get(name) for name in names}, strict=False)
    tied = config.tie_word_embeddings and not unties(settings)
    after = Decoder(network_after(config, settings.transform).model_copy(update={"tie_word_embeddings": tied}))
    assert not after.load_state_dict(tensors, strict=not tied).unexpected_keys
    return before, after, token_ids


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_stay_equal_to_rounding(
    make_tiny_checkpoint: Callable[..., Path], architecture: str, transform: str
) -> None:
    sizes = {"intermediate_size": 96} if transform == "hadamard" else {}  # whole blocks
    if architecture == "inner norms" and TRANSFORMS[transform]["rotate"]:
        pytest.skip("no rotation passes these norms")
    folder = make_tiny_checkpoint(**ARCHITECTURES[architecture] | sizes)
    zero_points = ("*",) if transform == "signs" else ()
    before, after, token_ids = transformed(folder, TRANSFORMS[transform], zero_points)
    if zero_points:  # channels changed sides, behind norms too
        layer = after.model.layers[1]
        assert (layer.input_layernorm.weight < 0).any()  # pyright: ignore
    with torch.no_grad():
        wanted, found = before(token_ids), after(token_ids)
    assert not torch.equal(before.model.layers[1].mlp.up_proj.weight, after.model.layers[1].mlp.up_proj.weight)  # pyright: ignore
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("size", [1, 2, 3, 16, 60, 64, 75, 576])
def test_rotations_are_orthogonal_flat_and_repeatable(size: int) -> None:
    matrix = rotation_matrix(size, seed=1)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert matrix.abs().max() <= (2 / size) ** 0.5 + 1e-12 or size == 1
    assert torch.equal(matrix, rotation_matrix(size, seed=1))
    assert size < 3 or not torch.equal(matrix, rotation_matrix(size, seed=2))


def test_a_rotation_makes_an_outlier_channel_harmless() -> None:
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    x[:, 17] *= 100
    matrix = rotation_matrix(576, seed=0).float()
    plain = (fake_quantize_activation(x) - x).norm()
    rotated = (fake_quantize_activation(x @ matrix) - x @ matrix).norm()
    assert rotated < 0.25 * plain


def test_a_hadamard_transform_makes_outliers_of_single_tokens_harmless() -> None:
    """No scale of a channel helps there: each token has its outlier elsewhere."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 96, generator=generator) * 0.1 + 10 * torch.eye(96)
    spread = hadamard(x, 32)
    plain = (fake_quantize_activation(x) - x).norm()
    assert (fake_quantize_activation(spread) - spread).norm() < 0.3 * plain


def test_smoothing_scale_follows_the_formula() -> None:
    activation, weight = torch.tensor([1.0, 4.0, 16.0]), torch.tensor([2.0, 2.0, 8.0])
    scale = smoothing_scale(activation, weight, 0.5)
    wanted = (activation / weight).sqrt()
    assert torch.allclose(scale, wanted / wanted.log().mean().exp())


def test_silent_channels_get_a_finite_scale() -> None:
    for activation in (torch.tensor([0.0, 1.0, 2.0]), torch.zeros(3)):
        scale = smoothing_scale(activation, torch.tensor([1.0, 0.0, 1.0]), 0.5)
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()


def test_one_huge_token_does_not_decide_a_channels_magnitude() -> None:
    x = torch.ones(512, 8)
    x[0] = 1.0
    x[0, 3] = 1e4
    assert torch.allclose(channel_magnitude(x), torch.ones(8))
