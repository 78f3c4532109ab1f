"""Compensated rounding: less output error than rounding to nearest, what it does not change, awkward activations."""

from __future__ import annotations

import pytest
import torch

from penjing.compress.decoder.compensate import COLUMNS, error_spread, quantize_compensated
from penjing.compress.decoder.weights import QuantizedWeight, quantize_per_channel


def correlated(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """(rows, columns) activations of rank about a quarter, with small noise."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, columns // 4, generator=generator) @ torch.randn(
        columns // 4, columns, generator=generator
    )
    return mixed + 0.1 * torch.randn(rows, columns, generator=generator)


def output_error(weight: torch.Tensor, quantized: QuantizedWeight, x: torch.Tensor) -> float:
    return float((x @ (weight - quantized.dequantize()).t()).square().sum())


@pytest.mark.parametrize("columns", [12, COLUMNS, 2 * COLUMNS + 40])
def test_it_errs_much_less_on_fresh_activations_of_the_same_kind(columns: int) -> None:
    weight = torch.randn(24, columns, generator=torch.Generator().manual_seed(1))
    every = correlated(2048, columns)
    quantized = quantize_compensated(weight, error_spread(every[:1024]))
    nearest = quantize_per_channel(weight)
    assert output_error(weight, quantized, every[1024:]) < 0.5 * output_error(weight, nearest, every[1024:])
    assert torch.equal(quantized.scale_N1, nearest.scale_N1)
    assert quantized.weight_NK.abs().max() <= 127


def test_it_equals_the_papers_algorithm_column_by_column_in_double_precision() -> None:
    weight, x = torch.randn(5, 40, generator=torch.Generator().manual_seed(2)), correlated(300, 40)
    found = quantize_compensated(weight, error_spread(x))
    hessian = (x.t() @ x).double()
    inverse = torch.linalg.inv(hessian + 0.01 * hessian.diagonal().mean() * torch.eye(40))
    left = weight.double() / found.scale_N1
    wanted = torch.empty(5, 40)
    for column in range(40):  # algorithm 1 without its Cholesky form: the inverse loses a row and a column each time
        wanted[:, column] = left[:, 0].round().clamp(-127, 127)
        error = (left[:, 0] - wanted[:, column]) / inverse[0, 0]
        left = (left - error[:, None] * inverse[0])[:, 1:]
        inverse = (inverse - torch.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    assert (found.weight_NK != wanted).float().mean() < 0.01  # ties of float32


@pytest.mark.parametrize("columns", [7, 400])
def test_the_spread_is_the_factor_of_the_inverse_in_double_precision(columns: int) -> None:
    x = correlated(2 * columns, columns)
    hessian = x.double().t() @ x.double()
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(columns)
    wanted = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    assert float((error_spread(x) - wanted).norm() / wanted.norm()) < 1e-4


@pytest.mark.parametrize("kind", ["zeros", "constant", "one token", "silent channels", "huge", "largest", "tiny"])
def test_awkward_activations_give_sound_weights(kind: str) -> None:
    x = correlated(64, 32)
    x = {
        "zeros": torch.zeros(64, 32),
        "constant": torch.ones(64, 32),
        "one token": x[:1],
        "silent channels": x * (torch.arange(32) % 2),
        "huge": x * 1e15,
        "largest": x * (3e38 / x.abs().max()),
        "tiny": x * 1e-15,
    }[kind]
    weight = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
    quantized, nearest = quantize_compensated(weight, error_spread(x)), quantize_per_channel(weight)
    assert torch.isfinite(quantized.dequantize()).all()
    assert (
        output_error(weight, quantized, x.clamp(-1, 1)) <= 1.01 * output_error(weight, nearest, x.clamp(-1, 1)) + 1e-6
    )
    if kind == "zeros":
        assert torch.equal(quantized.weight_NK, nearest.weight_NK)  # nothing to learn from
