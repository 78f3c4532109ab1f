"""Number formats: which values a quantized tensor can take, and which scale and zero point a range of floats needs.

A value x is stored as g = round(x / scale) + zero_point, clamped to [low, high] of the format, and read back as
(g − zero_point) × scale, as ONNX's QuantizeLinear and DequantizeLinear define it: half to even, before the zero point
is added (torch's fake_quantize adds it first, so an odd zero point turns ties the other way).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from penjing.core.errors import ConfigError

SMALLEST_SCALE = 2.0**-60  # products of two scales stay normal float32 numbers
# Of a range of zeros alone. A bias behind it is stored in steps of the product of two scales: with a scale of 1 it was
# off by 22 steps of its layer's result in a network whose last norm of each block is zero, as before training.
DEAD_SCALE = 2.0**-20
FormatName = Literal["int8", "int7", "uint8", "fp8"]  # what recipes name


class NumberFormat(Protocol):
    """A grid of values; `zero_point` is 0 wherever a format is symmetric."""

    @property
    def name(self) -> FormatName | Literal["int4"]: ...

    @property
    def low(self) -> float:
        """The smallest value that can be stored."""
        ...

    @property
    def high(self) -> float:
        """The largest value that can be stored."""
        ...

    def parameters(self, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point, float32 of the shape given, with which [min(lowest, 0), max(highest, 0)] is stored.

        A range of zeros alone gets `DEAD_SCALE`: it is stored exactly, and a bias in its steps nearly so.
        """
        ...

    def store(self, real: Tensor, zero: Tensor | float = 0.0) -> Tensor:
        """round(real) + zero, ties to even, clamped to [low, high]: what is stored of real × scale; floating."""
        ...


class _Symmetric:
    high: float

    def parameters(self, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """See `NumberFormat`."""
        return _scale(torch.maximum(lowest.abs(), highest.abs()) / self.high), torch.zeros_like(highest)


class _Integers:
    low: float
    high: float

    def store(self, real: Tensor, zero: Tensor | float = 0.0) -> Tensor:
        """See `NumberFormat`."""
        return (real.round() + zero).clamp(self.low, self.high)


@dataclass(frozen=True)
class SignedInteger(_Symmetric, _Integers):
    """Symmetric: scale = largest magnitude / high, zero point 0. With `low` = −high a weight may change its sign."""

    name: FormatName | Literal["int4"]
    low: float
    high: float


@dataclass(frozen=True)
class UnsignedInteger(_Integers):
    """Asymmetric: the range of the values is stretched over [0, 255]; zero is always stored exactly."""

    name: FormatName = "uint8"
    low: float = 0.0
    high: float = 255.0

    def parameters(self, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """See `NumberFormat`."""
        lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
        scale = _scale((highest - lowest) / self.high)
        return scale, (-lowest / scale).round().clamp(self.low, self.high)


@dataclass(frozen=True)
class Float8(_Symmetric):
    """FP8 with four bits of exponent and three of mantissa (E4M3, largest value 448, no infinity), simulated.

    https://arxiv.org/abs/2209.05433; beyond ±448 values saturate, as they do in hardware conversions.
    """

    name: FormatName = "fp8"
    low: float = -448.0
    high: float = 448.0

    def store(self, real: Tensor, zero: Tensor | float = 0.0) -> Tensor:
        """See `NumberFormat`."""
        return real.clamp(self.low, self.high).to(torch.float8_e4m3fn).to(real.dtype)


INT8_WEIGHT = SignedInteger("int8", -127.0, 127.0)
INT8_ACTIVATION = SignedInteger("int8", -128.0, 127.0)
# On x64 without VNNI two products u8 × s8 are added in 16 bits, which saturate beyond ±64: 2 × 255 × 63 < 2^15.
INT7_WEIGHT = SignedInteger("int7", -63.0, 63.0)
INT4_WEIGHT = SignedInteger("int4", -8.0, 7.0)  # of a decoder's groups
UINT8 = UnsignedInteger()
FP8 = Float8()


def weight_format(name: FormatName) -> NumberFormat:
    """The format of weights called `name`: symmetric, so that a scale may be negative before it is folded.

    Raises:
        ConfigError: weights have no such format.
    """
    return _named(name, "weights cannot be {name}: they are symmetric; use one of", INT8_WEIGHT, INT7_WEIGHT, FP8)


def activation_format(name: FormatName) -> NumberFormat:
    """The format of activations called `name`.

    Raises:
        ConfigError: activations have no such format.
    """
    return _named(name, "activations cannot be {name}; use one of", INT8_ACTIVATION, UINT8, FP8)


def _named(name: FormatName, refusal: str, *formats: NumberFormat) -> NumberFormat:
    known = {each.name: each for each in formats}
    if name not in known:
        raise ConfigError(f"{refusal.format(name=name)} {', '.join(known)}")
    return known[name]


def _scale(scale: Tensor) -> Tensor:
    scale = scale.to(torch.float32)
    return torch.where(scale > 0, scale.clamp(min=SMALLEST_SCALE), DEAD_SCALE)
