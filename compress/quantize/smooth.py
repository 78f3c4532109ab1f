"""SmoothQuant for text encoders (Xiao et al., https://arxiv.org/abs/2211.10438), its strength searched for each layer.

One scale for a whole activation wastes most of its steps where few channels are large: the outputs of GELU and of the
norms in BERT. Dividing channel j by s_j = max|x_j|^α / max|w_j|^(1 − α) and multiplying column j of the weights by it
leaves the product as it is. Attention averages values channel by channel, so theirs is done by the layer that makes
them. Elsewhere the division is a multiplication of its own in the graph, since the norm's output is also added to, and
GELU does not commute with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.quantize.targets import TARGETS, EncoderSettings, resolve
from penjing.compress.rounding.fake_quantize import WeightQuantizer
from penjing.compress.rounding.formats import NumberFormat, activation_format, weight_format
from penjing.core.models.encoder import Encoder

STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # α; 0 leaves the input as it is
ROWS = 1024  # tokens on which strengths are compared
SMOOTHED = ("output", "up", "down")  # attention's input gains less: MiniLM's cosine 0.9975 without, 0.9983 with it
_SMALLEST = 1e-5


class SmoothedLinear(nn.Linear):
    """A linear layer whose input is multiplied by `factor` (inputs,) first; it takes the weights of `original`."""

    factor: Tensor

    def __init__(self, original: nn.Linear, factor: Tensor) -> None:
        super().__init__(original.in_features, original.out_features, device="meta")
        self.weight, self.bias = original.weight, original.bias
        self.register_buffer("factor", factor)

    def forward(self, input: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return super().forward(input * self.factor)


@torch.no_grad()
def smooth(model: Encoder, batches: Iterable[tuple[Tensor, ...]], settings: EncoderSettings) -> dict[str, Tensor]:
    """Scale the weights of the floating `model`, in place, for each input of which that lowers the error.

    Args:
        batches: arguments of the model.

    Returns:
        "layers.3.up" → (inputs,) float32: what that layer, a `SmoothedLinear` now, multiplies its input by.
    """
    _, activations, weights = resolve(settings.target, settings)
    formats = activation_format(activations), weight_format(weights)
    seen: dict[str, _Inputs] = {}
    with ExitStack() as stack:
        for name, linear in _linears(model, settings):
            seen[name] = _Inputs()
            stack.callback(linear.register_forward_pre_hook(seen[name]).remove)
        for arguments in batches:
            model(*arguments)
    found: dict[str, Tensor] = {}
    for name, linear in list(_linears(model, settings)):
        scale = _best(seen[name].rows(), seen[name].largest, linear.weight, *formats)
        if scale is None:
            continue
        linear.weight.mul_(scale)
        if name.endswith(".output"):
            value = model.get_submodule(name.removesuffix("output") + "value")
            assert isinstance(value, nn.Linear)
            value.weight.div_(scale[:, None])
            value.bias.div_(scale)
        else:
            found[name] = 1 / scale
            model.set_submodule(name, SmoothedLinear(linear, found[name]))
    return found


class _Inputs:
    """A hook that keeps the largest magnitude of each channel, and some rows."""

    def __init__(self) -> None:
        self.largest = torch.zeros(())
        self._kept: list[Tensor] = []

    def __call__(self, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        rows = arguments[0].detach().flatten(0, -2)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self._kept.append(rows[:: max(1, len(rows) // 16)].clone())

    def rows(self) -> Tensor:
        """At most `ROWS` (rows, channels), evenly over all that was seen."""
        everything = torch.cat(self._kept)
        return everything[:: -(-len(everything) // ROWS)]


def _linears(model: Encoder, settings: EncoderSettings) -> Iterable[tuple[str, nn.Linear]]:
    for index, layer in enumerate(model.layers):
        for part in SMOOTHED:
            name, linear = f"layers.{index}.{part}", getattr(layer, part)
            small = min(linear.weight.shape) < TARGETS[settings.target].smallest_product
            if not small and not any(fnmatchcase(name, pattern) for pattern in settings.keep):
                yield name, linear


def _best(
    rows: Tensor, largest: Tensor, original: Tensor, activations: NumberFormat, stored: NumberFormat
) -> Tensor | None:
    """(inputs,) by which the columns of the weight `original` are best multiplied; None for no change."""
    wanted = rows @ original.T
    best, chosen = float("inf"), None
    for strength in STRENGTHS:
        scale = None
        if strength:
            columns = original.abs().amax(0).clamp(min=_SMALLEST)
            scale = largest.clamp(min=_SMALLEST) ** strength / columns ** (1 - strength)
        x, weight = (rows, original) if scale is None else (rows / scale, original * scale)
        integers, steps = WeightQuantizer(len(weight), stored).integers(weight)
        error = _rounded(x, activations) @ (integers.to(torch.float32) * steps[:, None]).T - wanted
        if (size := float(error.square().sum())) < best:
            best, chosen = size, scale
    return chosen


def _rounded(x: Tensor, number_format: NumberFormat) -> Tensor:
    step, zero = number_format.parameters(x.min(), x.max())
    return (number_format.store(x / step, zero) - zero) * step
