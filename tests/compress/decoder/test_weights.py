"""Weight quantization against compressed-tensors' own, on random and awkward matrices."""

from __future__ import annotations

import math

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

from penjing.compress.decoder.weights import ErrorMeter, fake_quantize_activation, linear_error, quantize_per_channel

CHANNEL_ARGS = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")  # pyright: ignore


def awkward(seed: int) -> torch.Tensor:
    """(37, 53) with rows of every magnitude, a row of zeros, one spike and exact halves of a step."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(37, 53, generator=generator) * torch.logspace(-20, 20, 37)[:, None]
    weight[3] = 0
    weight[4] = 0
    weight[4, 7] = -3e4
    weight[5] = torch.arange(53) - 26.5
    weight[5, 0] = 127  # scale 1: every other value is halfway between two integers
    return weight


@pytest.mark.parametrize("seed", range(5))
def test_integers_equal_those_of_compressed_tensors_for_the_same_scales(seed: int) -> None:
    weight = awkward(seed)
    ours = quantize_per_channel(weight)
    zero_point = torch.zeros_like(ours.scale_N1, dtype=torch.int8)
    theirs = quantize(weight, ours.scale_N1, zero_point, CHANNEL_ARGS, dtype=torch.int8)
    assert torch.equal(ours.weight_NK, theirs)
    assert torch.equal(ours.dequantize(), dequantize(theirs, ours.scale_N1, args=CHANNEL_ARGS))


def test_the_error_of_each_weight_is_at_most_half_a_step() -> None:
    weight = awkward(0)
    quantized = quantize_per_channel(weight)
    error = (weight.double() - quantized.weight_NK.double() * quantized.scale_N1.double()).abs()
    assert (error <= quantized.scale_N1.double() * (0.5 + 1e-4)).all()
    assert int(quantized.weight_NK.abs().max()) == 127


def test_a_row_of_zeros_stays_zero_with_scale_one() -> None:
    quantized = quantize_per_channel(awkward(0))
    assert quantized.scale_N1[3] == 1
    assert not quantized.weight_NK[3].any()


def test_a_token_quantizes_by_itself() -> None:
    x = torch.randn(2, 3, 16)
    assert torch.equal(fake_quantize_activation(x)[1, 2], fake_quantize_activation(x[1, 2][None])[0])


def test_errors_match_their_definition_and_add_up_over_row_blocks() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(24, 32, generator=generator), torch.randn(10, 32, generator=generator)
    quantized = quantize_per_channel(weight)
    error = linear_error(weight, quantized, x)
    approximate = quantized.dequantize()
    wanted = (x @ weight.t() - fake_quantize_activation(x) @ approximate.t()).norm() / (x @ weight.t()).norm()
    assert math.isclose(error.output, float(wanted), rel_tol=1e-4)
    assert math.isclose(error.weight, float((weight - approximate).norm() / weight.norm()), rel_tol=1e-4)
    meter = ErrorMeter()
    for rows in (slice(0, 7), slice(7, 24)):
        meter.add(weight[rows], quantize_per_channel(weight[rows]), x)
    assert math.isclose(meter.result().output, error.output, rel_tol=1e-4)
