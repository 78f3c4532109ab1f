"""Bias correction: rounding shifts the mean of a layer's outputs; the shift is taken out of its bias.

https://arxiv.org/abs/1906.04721, section 4.2, with means measured on calibration data. Layers are corrected in the
order in which they run, each on inputs from layers that are corrected already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from penjing.compress.quantize.place_resnet import Layer, layers


@torch.no_grad()
def correct_biases(model: nn.Module, floating: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Change the biases of `model`, calibrated and in evaluation mode, so that its layers' means are `floating`'s.

    One pass over `batches`: after n of them a bias holds the mean of n corrections.

    Args:
        floating: the network before quantization, with the same names.
    """
    means: dict[str, Tensor] = {}
    count = 1

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            means[name] = _mean(output)

        return hook

    def correct(name: str, layer: Layer) -> Callable[..., Tensor]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            layer.bias.add_((means[name] - _mean(output)) / count)
            return layer.forward(*arguments)  # not the call, which would come here again

        return hook

    with ExitStack() as stack:
        for name, layer in layers(model):
            stack.callback(floating.get_submodule(name).register_forward_hook(keep(name)).remove)
            stack.callback(layer.register_forward_hook(correct(name, layer)).remove)
        for arguments in batches:
            floating(*arguments)
            model(*arguments)
            count += 1


def _mean(output: Tensor) -> Tensor:
    """(channels,) of (N, channels, …)."""
    return output.transpose(0, 1).flatten(1).mean(1)
