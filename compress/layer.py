"""One decoder layer: rotate, calibrate, smooth, quantize."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penjing.compress.quantize import LinearError, QuantizedWeight, linear_error, quantize_per_channel
from penjing.compress.recipe import Recipe
from penjing.compress.rotate import rotate_layer, rotation_matrix
from penjing.compress.smoothquant import smooth_linears
from penjing.compress.stream import LayerStream, Weights

SAMPLE_ROWS = 512  # calibration tokens whose activations are kept, for smoothing scales and output errors
# Linear layers that read the same activations, by the first of them.
SAME_INPUT = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


class Activations:
    """Rows of what calibration saw at the input of each group of linear layers, evenly spread over the text."""

    def __init__(self, num_windows: int) -> None:
        self._rows_per_window = max(1, SAMPLE_ROWS // num_windows)
        self._rows: dict[str, list[Tensor]] = {}

    def observe(self, name: str, x: Tensor) -> None:
        """Take in one window's activations (1, T, K) at linear layer `name`."""
        if name in SAME_INPUT:
            x_TK = x.flatten(0, -2)
            step = max(1, x_TK.shape[0] // self._rows_per_window)
            self._rows.setdefault(name, []).append(x_TK[step // 2 :: step].clone())

    def samples(self) -> dict[str, Tensor]:
        """Group → (M, K) float32."""
        return {name: torch.cat(rows) for name, rows in self._rows.items()}


@dataclass(frozen=True)
class Rotations:
    """The orthogonal matrices of a run, float64; None: the recipe does not rotate."""

    residual_EE: Tensor  # noqa: N815
    head_DD: Tensor  # noqa: N815

    @classmethod
    def of(cls, recipe: Recipe, hidden_size: int, head_dim: int) -> Rotations | None:
        if not recipe.transform.rotate:
            return None
        seed = recipe.transform.rotate_seed
        return cls(rotation_matrix(hidden_size, seed), rotation_matrix(head_dim, seed + 1))


@dataclass(frozen=True)
class CompressedLayer:
    """Tensors of the artifact by their names inside the layer, and the error of each quantized linear layer."""

    tensors: Weights
    errors: dict[str, LinearError]


@torch.no_grad()
def compress_layer(
    stream: LayerStream, layer: int, recipe: Recipe, rotations: Rotations | None, hidden_WTE: Tensor
) -> CompressedLayer:
    """Compress `layer`; `hidden_WTE`, the calibration text's (rotated) hidden states, moves on to the next layer."""
    weights = stream.weights(layer)
    if rotations is not None:
        rotate_layer(weights, stream.config, rotations.residual_EE, rotations.head_DD)
    seen = Activations(num_windows=hidden_WTE.shape[0])
    stream.run(stream.float_layer(layer, weights), hidden_WTE, seen.observe)
    samples = seen.samples()
    scales = smooth_linears(weights, samples, stream.config, recipe.transform)

    tensors, errors = dict(weights), {}
    for group, linears in SAME_INPUT.items():
        x_MK = samples[group] / scales[group] if group in scales else samples[group]
        for linear in linears:
            if recipe.quantize.keeps(f"model.layers.{layer}.{linear}"):
                continue
            quantized = quantize_per_channel(weights[f"{linear}.weight"])
            errors[linear] = linear_error(weights[f"{linear}.weight"], quantized, x_MK)
            tensors |= quantized_tensors(linear, quantized)
    return CompressedLayer(tensors, errors)


def quantized_tensors(module: str, quantized: QuantizedWeight) -> Weights:
    """The tensors of a quantized linear layer under compressed-tensors' names."""
    return {f"{module}.weight": quantized.weight_NK, f"{module}.weight_scale": quantized.scale_N1}
