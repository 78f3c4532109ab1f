"""All quantizers of a network, found and switched together."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from penjing.compress.rounding.fake_quantize import ActivationQuantizer, Mode, WeightQuantizer


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Switch every quantizer; weights are never observed."""
    for module in model.modules():
        if isinstance(module, ActivationQuantizer):
            module.mode = mode
        elif isinstance(module, WeightQuantizer):
            module.mode = "on" if mode == "on" else "off"


def activation_quantizers(model: nn.Module) -> Iterator[ActivationQuantizer]:
    """Every quantizer of an activation, in order."""
    for module in model.modules():
        if isinstance(module, ActivationQuantizer):
            yield module
