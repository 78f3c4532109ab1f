"""Per-token quantization against numpy in float64, and its edges."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.quantize import dequantize_above, quantize_above, quantize_per_token
from penjing.kernels.rounding import round_clamp

pytestmark = pytest.mark.usefixtures("implementation")
SHAPES = [(1, 1), (1, 576), (3, 17), (31, 129), (5, 4097), (64, 33)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_equals_numpy(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * 7919 + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
    q, scale = quantize_per_token(x)
    expected_scale = np.abs(x.numpy()).max(axis=1) / np.float32(127)
    expected = np.clip(np.rint(x.numpy() / expected_scale[:, None]), -127, 127)
    assert q.dtype == torch.int8
    assert scale.dtype == torch.float32
    np.testing.assert_array_equal(scale.numpy(), expected_scale)
    np.testing.assert_array_equal(q.numpy(), expected)
    assert q.abs().amax(dim=1).eq(127).all()


def test_half_types_are_widened_first() -> None:
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, scale = quantize_per_token(x)
    q_wide, scale_wide = quantize_per_token(x.float())
    assert torch.equal(q, q_wide)
    assert torch.equal(scale, scale_wide)


def test_ties_round_to_even_and_127_6_does_not_wrap() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.6, -200.0])
    assert round_clamp(x).tolist() == [0, 2, 2, -0.0, -2, 126, 127, -127]
    ties = torch.tensor([[0.5, 1.5, -2.5, 127.0]])
    assert quantize_per_token(ties)[0].tolist() == [[0, 2, -2, 127]]


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 3.4e38])
def test_extreme_rows_stay_finite(value: float) -> None:
    q, scale = quantize_per_token(torch.full((2, 9), value))
    assert scale.isfinite().all()
    assert (scale > 0).all()
    restored = q.float() * scale[:, None]
    assert (restored - value).abs().max() <= scale.max() / 2


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_damage_stays_in_its_row_and_is_visible(value: float) -> None:
    x = torch.ones(3, 8)
    x[1, 3] = value
    _, scale = quantize_per_token(x)
    assert not scale[1].isfinite()
    assert scale[[0, 2]].isfinite().all()


def test_no_rows() -> None:
    q, scale = quantize_per_token(torch.empty(0, 8))
    assert q.shape == (0, 8)
    assert scale.shape == (0,)


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 0), torch.ones(2, 3, dtype=torch.int32)])
def test_refuses_other_shapes_and_types(x: Tensor) -> None:
    with pytest.raises(ValueError, match="floating"):
        quantize_per_token(x)


def test_a_view_with_strides_is_read_right() -> None:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(2)).t()[:, ::2]
    q, scale = quantize_per_token(x)
    with force_torch():
        expected, expected_scale = quantize_per_token(x.contiguous())
    assert torch.equal(q, expected)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_above_a_zero_point_equals_numpy(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator).exp() - 0.5
    q, scale, zero = quantize_above(x)
    assert scale.shape == zero.shape == (rows, -(-columns // 256))
    for block, begin in enumerate(range(0, columns, 256)):
        part = x[:, begin : begin + 256].numpy()
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        expected_scale = (high - low) / np.float32(255)
        expected_zero = np.rint(-low / expected_scale) - 128
        expected = np.clip(np.rint(part / expected_scale[:, None]) + expected_zero[:, None], -128, 127)
        np.testing.assert_array_equal(scale[:, block].numpy(), expected_scale)
        np.testing.assert_array_equal(zero[:, block].numpy(), expected_zero)
        np.testing.assert_array_equal(q[:, begin : begin + 256].numpy(), expected)


@pytest.mark.parametrize("columns", [9, 256, 600])
@pytest.mark.parametrize("value", [0.0, -3.0, 1e-40, 1.0e38])
def test_rows_of_one_value_above_a_zero_point_stay_near_it(value: float, columns: int) -> None:
    q, scale, zero = quantize_above(torch.full((2, columns), value))
    assert (dequantize_above(q, scale, zero) - value).abs().max() <= scale.max() / 2


@pytest.mark.parametrize("columns", [9, 256, 600])
def test_no_rows_have_no_blocks_above_a_zero_point(columns: int) -> None:
    q, scale, zero = quantize_above(torch.empty(0, columns))
    assert q.shape == dequantize_above(q, scale, zero).shape == (0, columns)
    assert scale.shape == zero.shape == (0, -(-columns // 256))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_damage_above_a_zero_point_is_visible_in_its_row(value: float) -> None:
    x = torch.ones(3, 300)
    x[1, 3] = value
    _, scale, _ = quantize_above(x)
    assert scale.isfinite().tolist() == [[True, True], [False, True], [True, True]]
