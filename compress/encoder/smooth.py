"""SmoothQuant for text encoders (Xiao et al., https://arxiv.org/abs/2211.10438), its strength searched for each input.

One scale for a whole activation wastes most of its steps where few channels are large: the outputs of GELU and of the
norms in BERT. Dividing channel j by s_j = max|x_j|^α / max|w_j|^(1 − α) and multiplying column j of the weights by it
leaves the product as it is. Here the division is a multiplication of its own in the graph, since the norm's output is
also added to, and GELU does not commute with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.encoder.placement import ATTENTION, stays_floating
from penjing.compress.encoder.recipe import EncoderQuantize
from penjing.compress.quant.fake_quantize import WeightQuantizer
from penjing.compress.quant.formats import NumberFormat, activation_format, weight_format
from penjing.compress.quant.targets import resolve
from penjing.core.models.encoder import Encoder

STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # α; 0 leaves the input as it is
ROWS = 1024  # tokens on which strengths are compared
GROUPS = {"input": ATTENTION, "output": ("output",), "up": ("up",), "down": ("down",)}  # which share an input
_SMALLEST = 1e-5


@torch.no_grad()
def smooth(model: Encoder, batches: Iterable[tuple[Tensor, ...]], settings: EncoderQuantize) -> dict[str, Tensor]:
    """Scale the weights of the floating `model`, in place, for each input of which that lowers the error.

    Args:
        batches: arguments of the model.

    Returns:
        "layers.3.up" → (inputs,) float32: what that layer's input must be multiplied by.
    """
    _, activations, weights = resolve(settings.target, settings)
    formats = activation_format(activations), weight_format(weights)
    seen: dict[str, _Inputs] = {}
    with ExitStack() as stack:
        for name, linears in _groups(model, settings):
            seen[name] = _Inputs()
            stack.callback(linears[0].register_forward_pre_hook(seen[name]).remove)
        for arguments in batches:
            model(*arguments)
    found: dict[str, Tensor] = {}
    for name, linears in _groups(model, settings):
        rows = seen[name].rows()
        scale = _best(rows, seen[name].largest, [linear.weight for linear in linears], *formats)
        if scale is not None:
            for linear in linears:
                linear.weight.mul_(scale)
            layer, _, group = name.rpartition(".")
            found |= {f"{layer}.{part}": 1 / scale for part in GROUPS[group]}
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


def _groups(model: Encoder, settings: EncoderQuantize) -> Iterable[tuple[str, list[nn.Linear]]]:
    for index, layer in enumerate(model.layers):
        for group, parts in GROUPS.items():
            linears = [getattr(layer, part) for part in parts]
            names = [f"layers.{index}.{part}" for part in parts]
            if not any(stays_floating(name, linear, settings) for name, linear in zip(names, linears, strict=True)):
                yield f"layers.{index}.{group}", linears


def _best(
    rows: Tensor, largest: Tensor, weights: list[Tensor], activations: NumberFormat, stored: NumberFormat
) -> Tensor | None:
    """(inputs,) by which the weights' columns are best multiplied; None for no change."""
    together = torch.cat(weights)
    wanted = rows @ together.T
    best, chosen = float("inf"), None
    for strength in STRENGTHS:
        scale = None
        if strength:
            columns = together.abs().amax(0).clamp(min=_SMALLEST)
            scale = largest.clamp(min=_SMALLEST) ** strength / columns ** (1 - strength)
        x, weight = (rows, together) if scale is None else (rows / scale, together * scale)
        integers, steps = WeightQuantizer(len(weight), stored).integers(weight)
        error = _rounded(x, activations) @ (integers.to(torch.float32) * steps[:, None]).T - wanted
        if (size := float(error.square().sum())) < best:
            best, chosen = size, scale
    return chosen


def _rounded(x: Tensor, number_format: NumberFormat) -> Tensor:
    step, zero = number_format.parameters(x.min(), x.max())
    return (number_format.store(x / step, zero) - zero) * step
