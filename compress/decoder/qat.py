"""INT8 linear layers of a decoder while it learns: they compute in floating point what the INT8 runtime computes.

Weights are rounded with one scale a row, activations with one a token (`kernels.quantize`); gradients pass as if
nothing was rounded. The scale of a row is learned by LSQ's gradient (https://arxiv.org/abs/1902.08153) in the logarithm
(https://arxiv.org/abs/1903.08066): it stays positive, and a step of an optimiser changes large and small ones alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.decoder.weights import QuantizedWeight
from penjing.compress.rounding.fake_quantize import fake_quantize
from penjing.compress.rounding.formats import INT8_WEIGHT
from penjing.kernels.quantize import quantize_above, quantize_per_token_torch
from penjing.kernels.rounding import INT8_LIMIT

UNIT = 0.005  # a usual scale: an update of 1e-5 moves a weight by 0.002 of its row's scale
SCALE_RATE = 10.0  # an update of 1e-5 changes a scale by 1e-4 of itself: the largest weight by 0.013 of it
LARGEST = (
    INT8_LIMIT - 1e-3
)  # scales: beyond the limit the largest weight of a row would count as clipped, and not learn
INSIDE = 0.49  # of a scale: how far a weight may begin from the integer that it begins with


class _Above(torch.autograd.Function):
    """The same with a zero point a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        q_MK, scale_M, zero_M = quantize_above(x.reshape(-1, x.shape[-1]))
        return ((q_MK - zero_M[:, None]).to(torch.float32) * scale_M[:, None]).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _PerToken(torch.autograd.Function):
    """Activations (…, K) as the runtime rounds them; no value is ever clipped, so the gradient is the identity's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        q_MK, scale_M = quantize_per_token_torch(x.reshape(-1, x.shape[-1]))
        return (q_MK.to(torch.float32) * scale_M[:, None]).view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class FakeInt8Linear(nn.Linear):
    """`Int8Linear` for training; (…, in_features) → (…, out_features).

    Attributes:
        weight: (out_features, in_features) weights over the scales that they began with, times UNIT.
        log_scale: (out_features,) logarithms of the scales over SCALE_RATE.
        begun_scale: (out_features, 1) the scales that training began with.
    """

    begun_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        device: torch.device | None = None,
        zero_points: bool = False,
    ) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.zero_points = zero_points
        self.log_scale = nn.Parameter(torch.zeros(out_features, device=device))
        self.register_buffer("begun_scale", torch.ones(out_features, 1, device=device))

    def scale(self) -> Tensor:
        """(out_features, 1) float32."""
        return (self.log_scale * SCALE_RATE).exp()[:, None]

    def float_weight(self) -> Tensor:
        """(out_features, in_features): what `forward` rounds."""
        return self.weight * (self.begun_scale / UNIT)

    @torch.no_grad()
    def begin(self, weight_NK: Tensor, quantized: QuantizedWeight) -> None:
        """Take the float weights as far as they round to the integers of `quantized`, and its scales."""
        self.begun_scale.copy_(quantized.scale_N1)
        self.log_scale.copy_(quantized.scale_N1[:, 0].log() / SCALE_RATE)
        apart_NK = weight_NK / quantized.scale_N1 - quantized.weight_NK
        near_NK = quantized.weight_NK + apart_NK.clamp(-INSIDE, INSIDE)
        self.weight.copy_(near_NK.clamp(-LARGEST, LARGEST) * UNIT)

    @torch.no_grad()
    def quantized(self) -> QuantizedWeight:
        """The integers and scales whose products `forward` multiplies with."""
        scale_N1 = self.scale()
        return QuantizedWeight(INT8_WEIGHT.store(self.float_weight() / scale_N1).to(torch.int8), scale_N1)

    def forward(self, input: Tensor) -> Tensor:
        scale_N1 = self.scale()
        weight_NK = fake_quantize(self.float_weight(), scale_N1, torch.zeros_like(scale_N1), INT8_WEIGHT)
        rounded = (_Above if self.zero_points else _PerToken).apply(input)
        return F.linear(rounded, weight_NK, self.bias)  # pyright: ignore[reportArgumentType]


def apply_fake_int8(model: nn.Module, names: Iterable[str], above: Callable[[str], bool] = lambda name: False) -> None:
    """Replace the linear layers `names` of `model`; their weights mean nothing until `begin`.

    Args:
        above: whether the activations of a layer have a zero point a token.
    """
    for name in names:
        layer = model.get_submodule(name)
        assert isinstance(layer, nn.Linear), name
        replacement = FakeInt8Linear(
            layer.in_features, layer.out_features, layer.bias is not None, layer.weight.device, above(name)
        )
        if layer.bias is not None:
            replacement.bias = layer.bias
        model.set_submodule(name, replacement)


def fake_int8_layers(model: nn.Module) -> dict[str, FakeInt8Linear]:
    """The layers that `apply_fake_int8` made, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, FakeInt8Linear)}


def begin_all(model: nn.Module, floating: nn.Module, stored: Callable[[str], Tensor]) -> None:
    """Give `model` the weights of `floating`, and its quantized layers the integers of an artifact.

    Args:
        floating: the same network without `apply_fake_int8`.
        stored: tensor name → tensor of the artifact.
    """
    layers = fake_int8_layers(model)
    unknown = model.load_state_dict(floating.state_dict(), strict=False).unexpected_keys
    assert not unknown, unknown
    for name, layer in layers.items():
        quantized = QuantizedWeight(stored(f"{name}.weight"), stored(f"{name}.weight_scale"))
        layer.begin(floating.get_parameter(f"{name}.weight").detach(), quantized)
