"""Quantized stand-ins for the parts of a ResNet: they hold the original modules and round around them.

Symmetric rounding with one scale for each output channel commutes with the factor γ / σ that a batch norm applies to
that channel: round(w / s) does not change when w and s are both multiplied. So the norm stays a norm while it learns,
what it sees is already the convolution with rounded weights, and folding multiplies scales alone: the integers of
training are those of the exported file, bit for bit. (Frameworks that fold first divide by γ / σ in each step, which
fails for γ = 0, where residual networks start.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.rounding.fake_quantize import ActivationQuantizer, WeightQuantizer
from penjing.core.models.resnet import Block, ConvNorm

LARGEST_BIAS = 2.0**30  # in steps of an INT32 accumulator, which also holds the products


@dataclass(frozen=True)
class Folded:
    """A layer without its norm: y = conv or linear(x, weight · scale) + bias.

    Attributes:
        weight: int8 or float8_e4m3fn where `scale` (channels,) float32 is given, else float32.
        bias: (channels,) float32.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor

    def dequantized(self) -> Tensor:
        """The weight in float32."""
        if self.scale is None:
            return self.weight
        return self.weight.to(torch.float32) * self.scale.view(-1, *[1] * (self.weight.dim() - 1))


class QuantizedConvNorm(nn.Module):
    """Convolution with rounded weights, then batch norm; input and output rounded where a quantizer is given."""

    frozen: Tensor  # bool, stored: whether the norm keeps its statistics in training too

    def __init__(
        self,
        original: ConvNorm,
        weight: WeightQuantizer | None,
        before: ActivationQuantizer | None = None,
        after: ActivationQuantizer | None = None,
    ) -> None:
        super().__init__()
        self.conv, self.norm = original.conv, original.norm
        self.weight_quantizer = weight
        self.input_quantizer, self.output_quantizer = before, after
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))

    @property
    def weight(self) -> Tensor:
        """Of the convolution, not rounded."""
        return self.conv.weight

    @property
    def bias(self) -> Tensor:
        """Of the norm."""
        return self.norm.bias

    def train(self, mode: bool = True) -> QuantizedConvNorm:
        """As of every module, but frozen statistics stay frozen."""
        super().train(mode)
        # Tensors without data, on which a run's memory is estimated, are of another class and cannot be asked.
        if type(self.frozen) is Tensor and self.frozen.device.type != "meta" and bool(self.frozen):
            self.norm.eval()
        return self

    def freeze_statistics(self) -> None:
        """From now on the norm applies its moving averages, as it will once it is folded."""
        self.frozen.fill_(True)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) → (N, channels, H', W')."""
        conv = self.conv
        weight = conv.weight if self.weight_quantizer is None else self.weight_quantizer(conv.weight)
        y = self.norm(
            F.conv2d(_maybe(self.input_quantizer, x), weight, None, conv.stride, conv.padding, 1, conv.groups)
        )
        return _maybe(self.output_quantizer, y)

    @torch.no_grad()
    def fold(self, input_scale: Tensor | None) -> Folded:
        """The convolution that equals this one in evaluation, to float32 rounding.

        Args:
            input_scale: () of its input, which bounds what an INT32 bias can express: a channel that the norm nearly
                switches off gets a larger scale, and so smaller integers.
        """
        factor, bias = batch_norm_factors(self.norm)
        if self.weight_quantizer is None:
            return Folded(self.conv.weight * factor.view(-1, 1, 1, 1), None, bias)
        integers, scale = self.weight_quantizer.integers(self.conv.weight)
        sign = torch.where(factor < 0, -1.0, 1.0).view(-1, 1, 1, 1)
        integers = (integers.to(torch.float32) * sign).to(integers.dtype)
        return bounded(self.weight_quantizer, integers, scale * factor.abs(), bias, input_scale)


class QuantizedLinear(nn.Module):
    """Linear layer with rounded weights and input."""

    def __init__(self, original: nn.Linear, weight: WeightQuantizer | None, before: ActivationQuantizer | None) -> None:
        super().__init__()
        self.weight, self.bias = original.weight, original.bias
        self.weight_quantizer, self.input_quantizer = weight, before

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs) → (N, outputs)."""
        weight = self.weight if self.weight_quantizer is None else self.weight_quantizer(self.weight)
        return F.linear(_maybe(self.input_quantizer, x), weight, self.bias)

    @torch.no_grad()
    def fold(self, input_scale: Tensor | None) -> Folded:
        """See `QuantizedConvNorm.fold`."""
        if self.weight_quantizer is None:
            return Folded(self.weight.clone(), None, self.bias.clone())
        integers, scale = self.weight_quantizer.integers(self.weight)
        return bounded(self.weight_quantizer, integers, scale, self.bias.clone(), input_scale)


class QuantizedBlock(nn.Module):
    """A residual block whose input is rounded once for all that read it; see `Block`."""

    def __init__(
        self, original: Block, before: ActivationQuantizer | None, after: ActivationQuantizer | None = None
    ) -> None:
        super().__init__()
        self.layers, self.shortcut = original.layers, original.shortcut
        self.input_quantizer, self.output_quantizer = before, after

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) → (N, C', H', W')."""
        x = y = _maybe(self.input_quantizer, x)
        for index, layer in enumerate(self.layers):
            y = layer(torch.relu(y) if index else y)
        return _maybe(self.output_quantizer, torch.relu(y + self.shortcut(x)))


@torch.no_grad()
def batch_norm_factors(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """(channels,) float32 factor and summand that a batch norm applies in evaluation; computed in float64."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    return factor.float(), (norm.bias.double() - norm.running_mean.double() * factor).float()


def _maybe(quantizer: ActivationQuantizer | None, x: Tensor) -> Tensor:
    return x if quantizer is None else quantizer(x)


def bounded(
    quantizer: WeightQuantizer, integers: Tensor, scale: Tensor, bias: Tensor, input_scale: Tensor | None
) -> Folded:
    """A layer of stored `integers` whose bias an INT32 accumulator can hold; see `QuantizedConvNorm.fold`."""
    needed = torch.zeros_like(scale) if input_scale is None else bias.abs() / (LARGEST_BIAS * input_scale)
    safe = torch.maximum(scale, needed)
    safe = torch.where(safe > 0, safe, torch.ones_like(safe))
    shape = (-1, *[1] * (integers.dim() - 1))
    changed = (safe != scale).view(shape)
    rounded = quantizer.format.store(integers.to(torch.float32) * (scale / safe).view(shape)).to(integers.dtype)
    if integers.dtype == torch.int8:
        return Folded(torch.where(changed, rounded, integers), safe, bias)
    both = torch.where(changed, rounded.to(torch.float32), integers.to(torch.float32))
    return Folded(both.to(integers.dtype), safe, bias)
