"""How far each quantized layer is from the floating one, given the same input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from penjing.compress.quantize.place_resnet import Layer, layers, set_mode


@torch.no_grad()
def layer_errors(model: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> list[dict[str, Any]]:
    """Relative root-mean-square errors of a calibrated model's layers: of the weight, and of the output when the
    layer's own quantizers alone are on; JSON-ready, in order.

    The model is in evaluation mode; all its quantizers are on before and after.
    """
    found = list(layers(model))
    sums = {name: torch.zeros(2, dtype=torch.float64) for name, _ in found}

    def watch(name: str, layer: Layer) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            set_mode(layer, "on")
            rounded = layer.forward(*arguments)  # not the call, which would come here again
            set_mode(layer, "off")
            sums[name] += torch.stack([(rounded - output).double().square().sum(), output.double().square().sum()])

        return hook

    set_mode(model, "off")
    try:
        with ExitStack() as stack:
            for name, layer in found:
                stack.callback(layer.register_forward_hook(watch(name, layer)).remove)
            for arguments in batches:
                model(*arguments)
    finally:
        set_mode(model, "on")
    return [
        {
            "name": name,
            "format": layer.weight_quantizer.format.name if layer.weight_quantizer is not None else "float32",
            "weight": _weight_error(layer),
            "output": ratio(*sums[name].tolist()),
        }
        for name, layer in found
    ]


def _weight_error(layer: Layer) -> float:
    if layer.weight_quantizer is None:
        return 0.0
    weight = layer.weight
    error = (layer.weight_quantizer(weight) - weight).double().square().sum()
    return ratio(float(error), float(weight.double().square().sum()))


def ratio(error: float, size: float) -> float:
    """The root of `error` / `size`, two sums of squares; 0 where there is nothing."""
    return (error / size) ** 0.5 if size > 0 else 0.0
