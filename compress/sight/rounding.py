"""A vision transformer and the projection behind it in INT8: weights with a scale a channel, activations with one a
patch, as in the decoder that reads their rows.

What a norm or the values give is divided channel by channel where the next weights can take that up (SmoothQuant);
weights are rounded so that their errors make up for each other on calibration images (GPTQ). Without images, weights
are rounded to nearest and nothing is smoothed. Of an encoder that is a graph, the projection alone is rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.decoder.compensate import error_spread, quantize_compensated
from penjing.compress.decoder.smooth import channel_magnitude, input_magnitude, smoothing_scale
from penjing.compress.decoder.weights import fake_quantize_activation, linear_error, quantize_per_channel
from penjing.compress.sight.rows import BATCH
from penjing.core.errors import InputError
from penjing.core.progress import Progress
from penjing.core.runtime.quantized import Int8Linear
from penjing.core.vision.projector import linears
from penjing.core.vision.sight import Sight, is_above
from penjing.core.vision.vision_language import pixel_shuffle
from penjing.core.vision.vit import VisionTransformer, ViTLayer

MOST_ROWS = 4096  # patches that calibrate a layer, evenly spread
ERROR_ROWS = 256  # of which a layer's error is told
READERS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.out_proj",), ("mlp.fc1",), ("mlp.fc2",)
)  # fmt: skip
"""The linear layers of a transformer's layer in the order in which they are computed; a group reads one input."""


@dataclass(frozen=True)
class RoundedSight:
    """`sight` runs in integers. `tensors` are what is stored of its linear layers, `floating` their smoothed weights
    before they were rounded; `layers` are rows of the report, none without images."""

    sight: Sight
    tensors: dict[str, Tensor]
    floating: dict[str, Tensor]
    layers: list[dict[str, Any]]


@torch.no_grad()
def round_sight(
    sight: Sight, images: Tensor | None, alpha: float, compensate: bool, progress: Progress
) -> RoundedSight:
    """`sight`, which stays as it is, in INT8.

    Args:
        images: (N, C, H, W) float32 normalised, which calibrate it; None: nothing does.
        alpha: of SmoothQuant; 0 leaves it out.
        compensate: errors of columns make up for each other; without it, and without images, to nearest.

    Raises:
        InputError: a weight or an activation is NaN or infinite.
    """
    made = _Rounding(copy.deepcopy(sight), compensate)
    vision = made.sight.vision
    layers = list(vision.encoder.layers) if isinstance(vision, VisionTransformer) else []
    progress.start("compressing what it sees with", len(layers) + 1)
    hidden = list[Tensor]()
    if images is not None:
        begun = vision.embedded if isinstance(vision, VisionTransformer) else vision
        hidden = [begun(batch) for batch in images.split(BATCH)]
    for place, layer in enumerate(layers):
        assert isinstance(layer, ViTLayer)
        prefix = f"vision.encoder.layers.{place}."
        if hidden and alpha:
            _smooth(layer, hidden, alpha)
        for readers in READERS:
            x_MK = _input(layer, readers[0], hidden) if hidden else None
            for name in readers:
                made.round(prefix + name, x_MK)
        hidden = [layer(each) for each in hidden]
        progress.advance()
    rows = list[Tensor]()
    if hidden:
        if alpha:
            _smooth_projection(made.sight, hidden, alpha)
        if isinstance(vision, VisionTransformer):
            hidden = [vision.finished(each) for each in hidden]
        rows = [pixel_shuffle(each, sight.config.scale_factor) for each in hidden]
    for name, _ in linears(made.sight.projector):
        x_MK = _input(made.sight.projector, name, rows) if rows else None
        made.round(".".join(filter(None, ("projector", name))), x_MK)
    progress.advance()
    return RoundedSight(made.sight, made.tensors, made.floating, made.layers)


class _Rounding:
    def __init__(self, sight: Sight, compensate: bool) -> None:
        self.sight, self._compensate = sight, compensate
        self.tensors: dict[str, Tensor] = {}
        self.floating: dict[str, Tensor] = {}
        self.layers: list[dict[str, Any]] = []

    def round(self, name: str, x_MK: Tensor | None) -> None:
        """Replace the linear layer `name`, whose inputs on calibration images are `x_MK`, by its integers."""
        layer = self.sight.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        weight_NK, above = layer.weight.detach(), is_above(name)
        if not bool(weight_NK.isfinite().all()):
            raise InputError(f"{name}.weight holds NaN or infinity; the model is damaged: get another copy")
        rounded = quantize_per_channel(weight_NK)
        if x_MK is not None:
            if not bool(x_MK.isfinite().all()):
                raise InputError(f"{name} reads NaN or infinity on the calibration images; look at both")
            if self._compensate:
                spread_KK = error_spread(fake_quantize_activation(x_MK, above=above))
                rounded = quantize_compensated(weight_NK, spread_KK)
            few_MK = x_MK[:: max(1, len(x_MK) // ERROR_ROWS)]
            error = linear_error(weight_NK, rounded, few_MK, above=above).as_dict()
            self.layers.append({"name": f"sight.{name}", "format": "int8", **error})
        bias_N = None if layer.bias is None else layer.bias.detach()
        self.sight.set_submodule(name, Int8Linear(rounded.weight_NK, rounded.scale_N1, bias_N, above))
        self.floating[f"{name}.weight"] = weight_NK
        self.tensors |= {f"{name}.weight": rounded.weight_NK, f"{name}.weight_scale": rounded.scale_N1}
        if bias_N is not None:
            self.tensors[f"{name}.bias"] = bias_N


def _smooth(layer: ViTLayer, hidden: Sequence[Tensor], alpha: float) -> None:
    """Both norms into what reads them, and the values into what reads the attention's result."""
    attention, mlp = layer.self_attn, layer.mlp
    for norm, readers, first in (
        (layer.layer_norm1, (attention.q_proj, attention.k_proj, attention.v_proj), READERS[0][0]),
        (layer.layer_norm2, (mlp.fc1,), "mlp.fc1"),
    ):
        scale_K = _scale(_input(layer, first, hidden), readers, alpha)
        _divide(norm, scale_K)
        for reader in readers:
            reader.weight.mul_(scale_K)
    scale_K = _scale(_input(layer, "self_attn.out_proj", hidden), (attention.out_proj,), alpha)
    attention.v_proj.weight.div_(scale_K[:, None])
    assert attention.v_proj.bias is not None
    attention.v_proj.bias.div_(scale_K)
    attention.out_proj.weight.mul_(scale_K)


def _smooth_projection(sight: Sight, hidden: Sequence[Tensor], alpha: float) -> None:
    """The last norm into the projector, whose first layer reads each of its channels once for each patch of a row."""
    vision, projector = sight.vision, sight.projector
    norm = vision.post_layernorm if isinstance(vision, VisionTransformer) else None
    if not (isinstance(vision, VisionTransformer) and isinstance(norm, nn.LayerNorm)):
        return  # what is read is the residual stream itself, or a graph's result, which nothing can divide
    weight = linears(projector)[0][1].weight
    x_ME = _rows([vision.finished(each) for each in hidden])
    size = x_ME.shape[1]
    magnitude_E = input_magnitude(weight).view(-1, size).amax(0)
    scale_E = smoothing_scale(channel_magnitude(x_ME), magnitude_E, alpha)
    _divide(norm, scale_E)
    weight.mul_(scale_E.repeat(weight.shape[1] // size))


def _scale(x_MK: Tensor, readers: Sequence[nn.Linear], alpha: float) -> Tensor:
    return smoothing_scale(channel_magnitude(x_MK), input_magnitude(*(each.weight for each in readers)), alpha)


def _divide(norm: nn.LayerNorm, scale_K: Tensor) -> None:
    norm.weight.div_(scale_K)
    norm.bias.div_(scale_K)


def _input(network: nn.Module, name: str, given: Sequence[Tensor]) -> Tensor:
    """What the linear layer `name` inside `network` reads on calibration images, (M, K); "" is the network itself."""
    found = list[Tensor]()
    handle = network.get_submodule(name).register_forward_pre_hook(_keep(found))
    try:
        for each in given:
            network(each)
    finally:
        handle.remove()
    return _rows(found)


def _keep(found: list[Tensor]) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        found.append(inputs[0])

    return keep


def _rows(found: Sequence[Tensor]) -> Tensor:
    x_MK = torch.cat([each.reshape(-1, each.shape[-1]) for each in found])
    return x_MK[:: -(-len(x_MK) // MOST_ROWS)]
