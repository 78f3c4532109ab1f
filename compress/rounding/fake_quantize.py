"""Fake quantization: floats rounded to what a number format stores, with gradients as if nothing was rounded.

Ranges may be learned: LSQ, https://arxiv.org/abs/1902.08153. The gradient of the scale s of y = s · (g − z) is
g − z − x / s inside the range and g − z where x is clipped. What is learned is the logarithm of s over its calibrated
value, as in https://arxiv.org/abs/1903.08066: a step changes s by a share of itself. Steps of s itself, which may be
0.001 or 10, overshot: by AdamW, whose steps are as long as the learning rate, and by SGD at a rate of 0.05, where
LSQ's factor 1 / √(values · high) did not prevent that scales grew 50-fold and the network was lost; that factor also
made updates depend on how many images a micro-batch holds.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from penjing.compress.rounding.formats import INT8_WEIGHT, SMALLEST_SCALE, NumberFormat
from penjing.compress.rounding.observers import Method, Observer

Mode = Literal["off", "observe", "on"]
LARGEST_GROWTH = 16.0  # of a learned scale, either way: e^16 is nine million


class _StraightThrough(torch.autograd.Function):
    """y = (stored(x / scale) − zero) · scale; the gradient passes where x is inside the range."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero: Tensor, number_format: NumberFormat) -> Tensor:
        real = x / scale
        rounded = number_format.store(real, zero) - zero
        ctx.save_for_backward(real, rounded, zero, scale)
        ctx.low, ctx.high = number_format.low, number_format.high
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
            to_scale = each.sum_to_size(scale.shape)
        return to_x, to_scale, None, None


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, number_format: NumberFormat) -> Tensor:
    """Round `x` to what `number_format` stores and widen it again; same shape and dtype.

    Args:
        scale, zero_point: float32, broadcast against `x`; scale > 0.
    """
    return _StraightThrough.apply(x, scale, zero_point, number_format)  # type: ignore[no-any-return]


class ActivationQuantizer(nn.Module):
    """Static quantization of a whole activation: one scale and zero point, found by an observer, perhaps learned on.

    Modes: "observe" passes values through and watches them, "on" rounds, "off" does nothing.

    Args:
        name: of the activation, for errors.
        learned: the scale is trained once it is calibrated (the zero point stays).
    """

    scale: Tensor  # as calibrated
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
        self.growth = nn.Parameter(torch.zeros(())) if learned else None  # log of the scale over the calibrated one
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
        if self.growth is not None:
            self.growth.zero_()
        self.zero_point.copy_(zero)
        self.ready.fill_(True)
        self.mode = "on"

    def positive_scale(self) -> Tensor:
        """The scale, () float32, positive and finite whatever training does to it."""
        return _grown(self.scale, self.growth)

    def forward(self, x: Tensor) -> Tensor:
        """`x` of any shape, rounded if the quantizer is on."""
        if self.mode == "observe":
            self.observer.observe(x)
        if self.mode != "on":
            return x
        return fake_quantize(x, self.positive_scale(), self.zero_point, self.format)

    def extra_repr(self) -> str:
        return f"{self.format.name}, {self.mode}"


class WeightQuantizer(nn.Module):
    """Symmetric quantization of a weight with one scale for each output channel (axis 0).

    Args:
        channels: of the output.
        learned: scales are trained; else each forward takes the largest magnitude of each channel.
    """

    scale: Tensor  # as calibrated, where it is learned

    def __init__(self, channels: int, number_format: NumberFormat, learned: bool = False) -> None:
        super().__init__()
        self.format = number_format
        self.mode: Mode = "off"
        self.growth = nn.Parameter(torch.zeros(channels)) if learned else None
        if learned:
            self.register_buffer("scale", torch.ones(channels))

    @torch.no_grad()
    def calibrate(self, weight: Tensor) -> None:
        """Start from the largest magnitude of each channel, and round from now on."""
        if self.growth is not None:
            self.scale.copy_(self._largest(weight))
            self.growth.zero_()
        self.mode = "on"

    def scales(self, weight: Tensor) -> Tensor:
        """(channels,) float32, positive."""
        return self._largest(weight) if self.growth is None else _grown(self.scale, self.growth)

    def forward(self, weight: Tensor) -> Tensor:
        """(channels, …) weight, rounded if the quantizer is on."""
        if self.mode != "on":
            return weight
        scale = self.scales(weight).view(-1, *[1] * (weight.dim() - 1))
        return fake_quantize(weight, scale, torch.zeros_like(scale), self.format)

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


class RowQuantizer(nn.Module):
    """Rows that were looked up in a table of which every row is rounded with a scale of its own; on in every mode."""

    def __init__(self) -> None:
        super().__init__()
        self._rounding = WeightQuantizer(1, INT8_WEIGHT)

    def forward(self, rows: Tensor) -> Tensor:
        """(…, size), rounded."""
        flat = rows.flatten(0, -2)
        scale = self._rounding.scales(flat)[:, None]
        return fake_quantize(flat, scale, torch.zeros_like(scale), INT8_WEIGHT).view_as(rows)

    def integers(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, size) int8 and (rows,) float32, whose product is what `forward` gives of the table's rows."""
        return self._rounding.integers(table)


def _grown(scale: Tensor, growth: Tensor | None) -> Tensor:
    if growth is None:
        return scale
    return (scale * growth.clamp(-LARGEST_GROWTH, LARGEST_GROWTH).exp()).clamp(min=SMALLEST_SCALE)
