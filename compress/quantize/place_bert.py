"""Quantizers placed into a text encoder from outside: around every linear layer, and on the word table."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from penjing.compress.quantize.modules import QuantizedLinear
from penjing.compress.quantize.targets import TARGETS, EncoderSettings, resolve
from penjing.compress.rounding.fake_quantize import ActivationQuantizer, WeightQuantizer
from penjing.compress.rounding.formats import INT8_WEIGHT, activation_format, weight_format
from penjing.core.errors import ConfigError, InputError
from penjing.core.models.encoder import Encoder, EncoderLayer

ATTENTION = ("query", "key", "value")  # which read the same input
LINEAR = (*ATTENTION, "output", "up", "down")


class QuantizedEmbedding(nn.Module):
    """A table of which every row is rounded with a scale of its own; rows are looked up, not multiplied."""

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.weight = original.weight
        self.quantizer = WeightQuantizer(original.num_embeddings, INT8_WEIGHT)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """(batch, seq) int64 → (batch, seq, hidden)."""
        rows = self.weight[tokens_BT]
        integers, scale = self.quantizer.integers(rows.flatten(0, 1))  # always rounded, whatever mode layers are in
        return (integers.to(rows.dtype) * scale[:, None]).view_as(rows)

    def integers(self) -> tuple[Tensor, Tensor]:
        """(words, hidden) int8 and (words,) float32, whose product is what `forward` looks up."""
        return self.quantizer.integers(self.weight)


class SmoothedLinear(QuantizedLinear):
    """A `QuantizedLinear` whose input is multiplied by `factor` (inputs,) before it is rounded; see `smooth`."""

    factor: Tensor

    def __init__(self, original: nn.Linear, weight: WeightQuantizer, before: ActivationQuantizer, factor: Tensor):
        super().__init__(original, weight, before)
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        """(…, inputs) → (…, outputs)."""
        return super().forward(x * self.factor)


def stays_floating(name: str, linear: nn.Linear, settings: EncoderSettings) -> bool:
    """Whether the layer `name` is too small for the target, or in the list `keep`."""
    small = min(linear.weight.shape) < TARGETS[settings.target].smallest_product
    return small or any(fnmatchcase(name, pattern) for pattern in settings.keep)


def apply_quantization(
    model: Encoder, settings: EncoderSettings, factors: Mapping[str, Tensor] | None = None
) -> Encoder:
    """Replace the parts of `model`, in place, by quantized ones; quantizers of activations are off until `calibrate`.

    Query, key and value read the same rounded input. Scores, softmax, norms and additions stay floating.

    Args:
        factors: what `smooth` gave, whose weights `model` has.

    Returns:
        `model`.

    Raises:
        ConfigError: the target cannot express the settings; a pattern of `keep` names no layer.
        InputError: the model is quantized already.
    """
    if any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in model.modules()):
        raise InputError("the model is quantized already; load its checkpoint again")
    _, activations, weights = resolve(settings.target, settings)
    if activations == "fp8":
        raise ConfigError("quantize.activations=fp8: text encoders are quantized to integers; use int8 or uint8")
    names = [f"layers.{index}.{part}" for index in range(len(model.layers)) for part in LINEAR]
    for pattern in settings.keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"quantize.keep: {pattern!r} matches no layer; there are {', '.join(names[:6])} …")

    def activation(name: str) -> ActivationQuantizer:
        return ActivationQuantizer(name, activation_format(activations), settings.observer, settings.percentile)

    for index, layer in enumerate(model.layers):
        assert isinstance(layer, EncoderLayer)
        shared = activation(f"layers.{index}.input")
        for part in LINEAR:
            name, linear = f"layers.{index}.{part}", getattr(layer, part)
            if stays_floating(name, linear, settings):
                continue
            quantizer = WeightQuantizer(len(linear.weight), weight_format(weights))
            before = shared if part in ATTENTION else activation(f"{name}.input")
            factor = (factors or {}).get(name)
            if factor is None:
                setattr(layer, part, QuantizedLinear(linear, quantizer, before))
            else:
                setattr(layer, part, SmoothedLinear(linear, quantizer, before, factor))
    if settings.embedding == "int8":
        model.words = QuantizedEmbedding(model.words)  # type: ignore[assignment]
    return model
