"""The batch-invariant linear layer: error rule, rows that do not depend on the batch, bad input."""

from __future__ import annotations

import pytest
import torch

from penjing.kernels.dispatch import force_torch
from penjing.kernels.linear import linear
from tests.kernels.gpu.error_rule import assert_as_close_as_torch

pytest.importorskip("triton")


def operands(rows: int, inner: int, columns: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + inner)
    shapes = (rows, inner), (columns, inner), (columns,), (rows, columns)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (3, 100, 70), (65, 64, 17)])
def test_error_rule(gpu_device: str, rows: int, inner: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, bias, residual = operands(rows, inner, columns, dtype, gpu_device)
    exact = (x.double() @ weight.double().t() + bias.double() + residual.double()).cpu()
    found = linear(x, weight, bias, residual_MN=residual)
    with force_torch():
        same = linear(x, weight, bias, residual_MN=residual)
    assert_as_close_as_torch("y", found.cpu(), same.cpu(), exact)


def test_wide_results_of_half_operands(gpu_device: str) -> None:
    x, weight, _, _ = operands(5, 40, 30, torch.float16, gpu_device)
    found = linear(x, weight, dtype=torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu(), (x.double() @ weight.double().t()).float().cpu(), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_the_batch_or_on_strides(gpu_device: str) -> None:
    x, weight, bias, _ = operands(70, 48, 20, torch.float32, gpu_device)
    if gpu_device == "cpu":  # the interpreter's products are numpy's, whose rows depend on their place: exact sums
        x, weight, bias = x.round(), weight.round(), bias.round()
    whole = linear(x, weight, bias)
    for start, end in ((0, 1), (66, 67), (3, 70)):
        assert torch.equal(linear(x[start:end], weight, bias), whole[start:end])
    wide = torch.randn(70, 100, device=gpu_device)
    wide[:, 20:68] = x
    assert torch.equal(linear(wide[:, 20:68], weight, bias), whole)
    assert torch.equal(linear(x.t().contiguous().t(), weight, bias), whole)


def test_no_rows(gpu_device: str) -> None:
    x, weight, bias, _ = operands(4, 8, 20, torch.float16, gpu_device)
    assert linear(x[:0], weight, bias).shape == (0, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"residual_MN": torch.ones(4, 19)}, r"residual is \(4, 19\)"),
        ({"residual_MN": torch.ones(4, 20).half()}, "float16"),
    ],
)
def test_refuses(gpu_device: str, change: dict, message: str) -> None:
    x, weight, bias, _ = operands(4, 8, 20, torch.float32, gpu_device)
    with pytest.raises(ValueError, match=message):
        linear(x, weight, bias, **change)
