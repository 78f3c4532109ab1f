"""Round-to-nearest INT8 weights with one scale an output channel, and how far they are from the original."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penjing.kernels.quantize import dequantize_above, quantize_above, quantize_per_token
from penjing.kernels.rounding import INT8_LIMIT, round_clamp_

TOKENS_AT_ONCE = 256  # of activations: what is between fits the cache
ROWS_AT_ONCE = 8192  # of an embedding or LM head: bounds what float temporaries take


@dataclass(frozen=True)
class QuantizedWeight:
    """weight ≈ weight_NK × scale_N1: int8 in [−127, 127] and float32, as compressed-tensors stores them."""

    weight_NK: Tensor  # noqa: N815
    scale_N1: Tensor  # noqa: N815

    def dequantize(self) -> Tensor:
        """(N, K) float32."""
        return self.weight_NK.to(torch.float32) * self.scale_N1


def quantize_per_channel(weight_NK: Tensor) -> QuantizedWeight:
    """Symmetric INT8 with scale = amax / 127 for each row; a row of zeros gets scale 1.

    Args:
        weight_NK: (out_features, in_features) floating.
    """
    scale_N1 = weight_NK.abs().amax(dim=1, keepdim=True).to(torch.float32) / INT8_LIMIT
    scale_N1.masked_fill_(scale_N1 == 0, 1.0)
    quantized = round_clamp_(weight_NK.to(torch.float32) / scale_N1).to(torch.int8)
    return QuantizedWeight(quantized, scale_N1)


def fake_quantize_activation(x: Tensor, group: int | None = 0, above: bool = False) -> Tensor:
    """Quantize each token of `x` (…, K) as the INT8 runtime does and widen it again; float32.

    Args:
        group: neighbours that share a scale; 0: all K; None: bfloat16.
        above: with zero points, see `kernels.quantize.quantize_above`.
    """
    if group is None:
        return x.detach().to(torch.bfloat16).to(torch.float32)
    rows_MK = x.detach().reshape(-1, x.shape[-1] if above else group or x.shape[-1])
    found_MK = torch.empty(rows_MK.shape)
    for part_MK, into_MK in zip(rows_MK.split(TOKENS_AT_ONCE), found_MK.split(TOKENS_AT_ONCE), strict=True):
        if above:
            into_MK.copy_(dequantize_above(*quantize_above(part_MK)))
            continue
        q_MK, scale_M = quantize_per_token(part_MK)
        into_MK.copy_(q_MK).mul_(scale_M[:, None])
    return found_MK.view(x.shape)


@dataclass(frozen=True)
class LinearError:
    """Relative root-mean-square errors of one quantized linear layer."""

    weight: float  # ‖W − Ŵ‖ / ‖W‖
    output: float  # ‖X·Wᵀ − X̂·Ŵᵀ‖ / ‖X·Wᵀ‖, with activations quantized too

    def as_dict(self) -> dict[str, float]:
        return {"weight": self.weight, "output": self.output}


class Approximation(Protocol):
    """Stored weights, whatever their format."""

    def dequantize(self) -> Tensor:
        """(N, K) float32."""
        ...


class ErrorMeter:
    """Adds up the error of a quantized linear layer over blocks of its rows.

    Args:
        group, above: of `fake_quantize_activation`.
    """

    def __init__(self, group: int | None = 0, above: bool = False) -> None:
        self._group, self._above = group, above
        self._squares = torch.zeros(4, dtype=torch.float64)  # weight error, weight, output error, output

    def add(self, weight_NK: Tensor, quantized: Approximation, x_MK: Tensor) -> None:
        """Compare the float rows `weight_NK` with their quantized form on the sample `x_MK`."""
        approximate_NK = quantized.dequantize()
        output_MN = x_MK @ weight_NK.t()
        error_MN = output_MN - fake_quantize_activation(x_MK, self._group, self._above) @ approximate_NK.t()
        self._squares += torch.stack(
            [_square_sum(part) for part in (weight_NK - approximate_NK, weight_NK, error_MN, output_MN)]
        )

    def result(self) -> LinearError:
        weight_error, weight, output_error, output = self._squares.tolist()
        return LinearError(_ratio(weight_error, weight), _ratio(output_error, output))


def linear_error(
    weight_NK: Tensor, quantized: Approximation, x_MK: Tensor, group: int | None = 0, above: bool = False
) -> LinearError:
    """How far the stored weight with INT8 activations is from the float layer on the sample `x_MK` (M, K) float32.

    Args:
        group, above: of `fake_quantize_activation`.
    """
    meter = ErrorMeter(group, above)
    meter.add(weight_NK, quantized, x_MK)
    return meter.result()


def _square_sum(x: Tensor) -> Tensor:
    return x.square().sum(dtype=torch.float64)


def _ratio(error: float, size: float) -> float:
    return (error / size) ** 0.5 if size > 0 else 0.0
