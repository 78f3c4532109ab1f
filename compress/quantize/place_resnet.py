"""Quantizers placed into a ResNet from outside, where a target wants them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from penjing.compress.quantize.modules import QuantizedBlock, QuantizedConvNorm, QuantizedLinear
from penjing.compress.quantize.targets import ClassifierSettings, TargetName, resolve
from penjing.compress.rounding.fake_quantize import ActivationQuantizer, Mode, WeightQuantizer
from penjing.compress.rounding.formats import activation_format, weight_format
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.resnet import Block, ConvNorm, ResNet

Layer = QuantizedConvNorm | QuantizedLinear


def apply_quantization(model: ResNet, target: TargetName, settings: ClassifierSettings | None = None) -> ResNet:
    """Replace the parts of `model`, in place, by quantized ones; all quantizers are off until `calibrate`.

    The input of every quantized layer is rounded, where several layers read it once; an addition's inputs as the
    target wants. A max pool needs nothing: it commutes with rounding.

    Returns:
        `model`.

    Raises:
        ConfigError: the target cannot express the settings; a pattern of `keep` names no layer.
        InputError: the model is quantized already, or of another kind.
    """
    settings = settings or ClassifierSettings()
    if not isinstance(model, ResNet):
        raise InputError(f"{type(model).__name__} is not quantized for ONNX; a ResNet classifier is")
    if any(isinstance(module, Layer) for module in model.modules()):
        raise InputError("the model is quantized already; load its checkpoint again")
    _Placement(model, target, settings).apply()
    return model


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Find every range by running the floating model over `batches` (arguments of the model), then round.

    Raises:
        InputError: a weight or an activation holds NaN or infinity, or nothing was seen; the layer is named.
    """
    check_weights(model)
    was_training = model.training
    model.eval()
    set_mode(model, "observe")
    try:
        look(model, batches)
    finally:
        set_mode(model, "off")
        model.train(was_training)
    for quantizer in activation_quantizers(model):
        quantizer.calibrate()
    for _, layer in layers(model):
        if layer.weight_quantizer is not None:
            layer.weight_quantizer.calibrate(layer.weight)


def check_weights(model: nn.Module) -> None:
    """Refuse a damaged network.

    Raises:
        InputError: a weight holds NaN or infinity.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise InputError(f"the weight {name} holds NaN or infinity; the checkpoint is damaged, train it again")


def look(model: nn.Module, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Run `model` over calibration data for what its hooks or observers see.

    Raises:
        InputError: the data do not fit the model.
    """
    try:
        for arguments in batches:
            model(*arguments)
    except RuntimeError as error:  # torch names no layer for a wrong shape
        raise InputError(f"calibration: the data do not fit the model ({str(error).splitlines()[0]})") from error


def set_mode(model: nn.Module, mode: Mode) -> None:
    """Switch every quantizer; weights are never observed."""
    for module in model.modules():
        if isinstance(module, ActivationQuantizer):
            module.mode = mode
        elif isinstance(module, WeightQuantizer):
            module.mode = "on" if mode == "on" else "off"


def freeze_statistics(model: nn.Module) -> None:
    """Keep every batch norm's statistics from now on."""
    for module in model.modules():
        if isinstance(module, QuantizedConvNorm):
            module.freeze_statistics()


def layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Every convolution and linear layer that was replaced, by name, in order."""
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            yield name, module


def activation_quantizers(model: nn.Module) -> Iterator[ActivationQuantizer]:
    """Every quantizer of an activation, in order."""
    for module in model.modules():
        if isinstance(module, ActivationQuantizer):
            yield module


class _Placement:
    def __init__(self, model: ResNet, target: TargetName, settings: ClassifierSettings) -> None:
        self.model, self.settings = model, settings
        self.target, activations, weights = resolve(target, settings)
        self.activations, self.weights = activation_format(activations), weight_format(weights)
        names = [name for name, module in model.named_modules() if isinstance(module, ConvNorm | nn.Linear)]
        for pattern in settings.keep:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"keep: {pattern!r} matches no layer; there are {', '.join(names)}")

    def apply(self) -> None:
        model = self.model
        model.stem = self._conv("stem", model.stem, before=True)  # type: ignore[assignment]
        last = len(model.blocks) - 1
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            after = self.target.pooling and index == last
            model.blocks[index] = self._block(f"blocks.{index}", block, after)
        weight = self._weight("fc", model.fc.weight)
        before = None if weight is None else self._activation("fc.input")
        model.fc = QuantizedLinear(model.fc, weight, before)  # type: ignore[assignment]

    def _block(self, name: str, block: Block, after: bool) -> QuantizedBlock:
        both = self.target.residual == "both"
        last = len(block.layers) - 1
        for index, layer in enumerate(block.layers):
            assert isinstance(layer, ConvNorm)
            after_last = both and index == last
            block.layers[index] = self._conv(f"{name}.layers.{index}", layer, before=index > 0, after=after_last)
        if isinstance(block.shortcut, ConvNorm):
            shortcut = self._conv(f"{name}.shortcut", block.shortcut, before=False, after=True)
            block.shortcut = shortcut  # type: ignore[assignment]
        readers = [block.layers[0], block.shortcut]
        wanted = both or any(getattr(reader, "weight_quantizer", None) is not None for reader in readers)
        wanted = wanted or isinstance(block.shortcut, nn.Identity)
        return QuantizedBlock(
            block,
            self._activation(f"{name}.input") if wanted else None,
            self._activation(f"{name}.output") if after else None,
        )

    def _conv(self, name: str, original: nn.Module, *, before: bool, after: bool = False) -> QuantizedConvNorm:
        assert isinstance(original, ConvNorm)
        weight = self._weight(name, original.conv.weight)
        return QuantizedConvNorm(
            original,
            weight,
            self._activation(f"{name}.input") if before and weight is not None else None,
            self._activation(f"{name}.output") if after else None,
        )

    def _weight(self, name: str, weight: Tensor) -> WeightQuantizer | None:
        """None for a layer that stays floating."""
        small = min(weight.shape[0], weight[0].numel()) < self.target.smallest_product
        if small or any(fnmatchcase(name, pattern) for pattern in self.settings.keep):
            return None
        return WeightQuantizer(weight.shape[0], self.weights, self.settings.learn_weights)

    def _activation(self, name: str) -> ActivationQuantizer:
        settings = self.settings
        return ActivationQuantizer(
            name, self.activations, settings.observer, settings.percentile, settings.learn_activations
        )
