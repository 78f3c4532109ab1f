"""Fake quantization: floats rounded to what a number format stores, with gradients as if nothing was rounded.

Ranges may be learned: LSQ, https://arxiv.org/abs/1902.08153. The gradient of the scale s of y = s · (g − z) is
g − z − x / s inside the range and g − z where x is clipped, times 1 / √(values · high), which makes steps of scales
and weights comparable (section 2.2 there).
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing.compress.quant.formats import SMALLEST_SCALE, NumberFormat
from penjing.compress.quant.observers import Method, Observer

Mode = Literal["off", "observe", "on"]


class _StraightThrough(torch.autograd.Function):
    """y = (stored(x / scale) − zero) · scale; the gradient passes where x is inside the range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, number_format: NumberFormat, factor: float) -> Tensor:
        real = x / scale
        rounded = number_format.store(real, zero) - zero
        ctx.save_for_backward(real, rounded, zero, scale)
        ctx.low, ctx.high, ctx.factor = number_format.low, number_format.high, factor
        return rounded * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        real, rounded, zero, scale = ctx.saved_tensors
        inside = (real >= ctx.low - zero) & (real <= ctx.high - zero)
        to_x = gradient * inside if ctx.needs_input_grad[0] else None
        to_scale = None
        if ctx.needs_input_grad[1]:
            each = gradient * torch.where(inside, rounded - real, rounded)
            to_scale = each.sum_to_size(scale.shape) * ctx.factor
        return to_x, to_scale, None, None, None


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, number_format: NumberFormat, factor: float = 1.0
) -> Tensor:
    """Round `x` to what `number_format` stores and widen it again; same shape and dtype.

    Args:
        scale, zero_point: float32, broadcast against `x`; scale > 0.
        factor: of the scale's gradient.
    """
    return _StraightThrough.apply(x, scale, zero_point, number_format, factor)  # type: ignore[no-any-return]


class ActivationQuantizer(nn.Module):
    """Static quantization of a whole activation: one scale and zero point, found by an observer, perhaps learned on.

    Modes: "observe" passes values through and watches them, "on" rounds, "off" does nothing.

    Args:
        name: of the activation, for errors.
        learned: the scale is a parameter once it is calibrated (the zero point stays).
    """

    scale: Tensor
    zero_point: Tensor
    ready: Tensor  # bool: whether the scale means something; stored, so that a loaded model knows

    def __init__(
        self,
        name: str,
        number_format: NumberFormat,
        method: Method = "minmax",
        percentile: float = 0.9999,
        learned: bool = False,
    ) -> None:
        super().__init__()
        self.name, self.format = name, number_format
        self.observer = Observer(name, method, percentile)
        self.mode: Mode = "off"
        if learned:
            self.scale = nn.Parameter(torch.ones(()))
        else:
            self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros(()))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))

    @torch.no_grad()
    def calibrate(self) -> None:
        """Take the range that was observed, and round from now on.

        Raises:
            InputError: nothing was observed.
        """
        low, high = self.observer.range(self.format)
        scale, zero = self.format.parameters(torch.tensor(low), torch.tensor(high))
        self.scale.copy_(scale)
        self.zero_point.copy_(zero)
        self.ready.fill_(True)
        self.mode = "on"

    def positive_scale(self) -> Tensor:
        """The scale, () float32, kept positive whatever training does to it."""
        return self.scale.abs().clamp(min=SMALLEST_SCALE)

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape, rounded if the quantizer is on."""
        if self.mode == "observe":
            self.observer.observe(x)
        if self.mode != "on":
            return x
        factor = 1 / math.sqrt(x.numel() * self.format.high)
        return fake_quantize(x, self.positive_scale(), self.zero_point, self.format, factor)

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.mode}"


class WeightQuantizer(nn.Module):
    """Symmetric quantization of a weight with one scale for each output channel (axis 0).

    Args:
        channels: of the output.
        learned: scales are parameters; else each forward takes the largest magnitude of each channel.
    """

    scale: Tensor

    def __init__(self, channels: int, number_format: NumberFormat, learned: bool = False) -> None:
        super().__init__()
        self.format, self.learned = number_format, learned
        self.mode: Mode = "off"
        if learned:
            self.scale = nn.Parameter(torch.ones(channels))

    @torch.no_grad()
    def calibrate(self, weight: Tensor) -> None:
        """Start from the largest magnitude of each channel, and round from now on."""
        if self.learned:
            self.scale.copy_(self._largest(weight))
        self.mode = "on"

    def scales(self, weight: Tensor) -> Tensor:
        """(channels,) float32, positive."""
        return self.scale.abs().clamp(min=SMALLEST_SCALE) if self.learned else self._largest(weight)

    def forward(self, weight: Tensor) -> Tensor:
        """(channels, …) weight, rounded if the quantizer is on."""
        if self.mode != "on":
            return weight
        scale = self.scales(weight).view(-1, *[1] * (weight.dim() - 1))
        factor = 1 / math.sqrt(weight[0].numel() * self.format.high)
        return fake_quantize(weight, scale, torch.zeros_like(scale), self.format, factor)

    @torch.no_grad()
    def integers(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What is stored of (channels, …) `weight`: values of the format (int8, or float8_e4m3fn), scales (channels,).

        (channels, …) · scale is exactly what `forward` gives.
        """
        scale = self.scales(weight)
        rounded = self.format.store(weight / scale.view(-1, *[1] * (weight.dim() - 1)))
        return rounded.to(torch.float8_e4m3fn if self.format.name == "fp8" else torch.int8), scale

    def _largest(self, weight: Tensor) -> Tensor:
        largest = weight.detach().flatten(1).abs().amax(1)
        return self.format.parameters(-largest, largest)[0]

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.mode}"
