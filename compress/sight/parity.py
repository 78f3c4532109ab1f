"""Images through the INT8 runtime of a vision transformer, and through floats that imitate it; and both through the
decoder that reads their rows."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from penjing.compress.decoder.parity import BETWEEN, HINT, tensor_difference
from penjing.compress.decoder.weights import fake_quantize_activation
from penjing.core.artifact.parity import Bound, Difference, gate
from penjing.core.checkpoint.load import load_model
from penjing.core.models.decoder import Decoder
from penjing.core.runtime.quantized import Int8Linear
from penjing.core.vision.graph_eyes import GraphEyesConfig
from penjing.core.vision.sight import Sight
from penjing.core.vision.vit import VisionTransformer, ViTConfig

PICTURES = 3
SIGHT_LAYERS, SIGHT_ROWS, SIGHT_LOGITS = "sight_layer_outputs", "sight_rows", "sight_logits"
"""What is compared: each layer of the transformer when both get the same input, relative to the root mean square of
the patch's hidden state; the rows of an image, likewise; the logits behind an image, as they are."""
BOUND = Bound(between=BETWEEN, quantity=SIGHT_LAYERS, statistic="mean", value=0.05)


@torch.inference_mode()
def measure_sight(folder: Path, bound: Bound = BOUND) -> tuple[Difference, ...]:
    """The differences of an artifact whose eyes run in INT8; none where they do not, or it has none.

    Raises:
        InputError: the bound is exceeded (an artifact that does so is refused), or there is NaN.
    """
    loaded = load_model(folder)
    if loaded.sight is None or loaded.sight.config.linears != "int8":
        return ()
    runtime, imitated = loaded.sight, _imitated(loaded.sight)
    pictures = [_picture(runtime.config.vision, seed) for seed in range(PICTURES)]
    rows = [sight.rows_of(pictures) for sight in (imitated, runtime)]
    logits = [_logits(loaded.model, each, runtime.config.image_token_id) for each in rows]
    differences = (
        tensor_difference(BETWEEN, SIGHT_LAYERS, _layer_gaps(imitated, runtime, pictures)),
        tensor_difference(BETWEEN, SIGHT_ROWS, _relative(*rows)),
        tensor_difference(BETWEEN, SIGHT_LOGITS, (logits[0] - logits[1]).abs()),
    )
    gate(differences, bound, HINT)
    return differences


class _Imitation(nn.Module):
    """What an `Int8Linear` computes, in floats."""

    def __init__(self, layer: Int8Linear) -> None:
        super().__init__()
        self._packed = layer.packed

    def forward(self, x: Tensor) -> Tensor:
        packed = self._packed
        weight_NK = packed.weight_NK.to(torch.float32) * packed.scale_N[:, None]
        return F.linear(fake_quantize_activation(x, above=packed.zero_points), weight_NK, packed.bias_N)


def _imitated(sight: Sight) -> Sight:
    made = copy.deepcopy(sight)
    for name, module in list(made.named_modules()):
        if isinstance(module, Int8Linear):
            made.set_submodule(name, _Imitation(module))
    return made


def _picture(config: ViTConfig | GraphEyesConfig, seed: int) -> NDArray[np.uint8]:
    """A smooth picture with noise, (height, width, channels)."""
    random, side = np.random.default_rng(seed), config.image_size
    waves = np.sin(np.arange(side)[:, None] * random.uniform(0.02, 0.5) + np.arange(side) * random.uniform(0.02, 0.5))
    values = 128 + 90 * waves[:, :, None] * random.uniform(0.5, 1, config.num_channels)
    return np.clip(values + random.normal(0, 12, (side, side, config.num_channels)), 0, 255).astype(np.uint8)


def _layer_gaps(imitated: Sight, runtime: Sight, pictures: list[NDArray[np.uint8]]) -> Tensor:
    gaps, handles = list[Tensor](), []

    def compare(place: int, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        gaps.append(_relative(output, _layers(runtime)[place](inputs[0])).flatten())

    for place, layer in enumerate(_layers(imitated)):
        handles.append(layer.register_forward_hook(lambda *each, place=place: compare(place, *each)))
    imitated.rows_of(pictures)
    for handle in handles:
        handle.remove()
    return torch.cat(gaps)


def _layers(sight: Sight) -> list[nn.Module]:
    """Those that are compared; of an encoder that is a graph and stays in floats, the projection."""
    vision = sight.vision
    return list(vision.encoder.layers) if isinstance(vision, VisionTransformer) else [sight.projector]


def _relative(wanted: Tensor, found: Tensor) -> Tensor:
    return (found - wanted).abs() / wanted.square().mean(dim=-1, keepdim=True).sqrt()


def _logits(decoder: Decoder, rows_NRE: Tensor, token: int) -> Tensor:
    return decoder(torch.full(rows_NRE.shape[:2], token), embedded=rows_NRE)
