"""INT8 products in the Triton language: sums equal torch._int_mm's exactly, every epilogue follows its reference."""

import pytest
import torch
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.gpu.int8_matmul import TILES, tile_of
from penjing.kernels.int8_linear import (
    PackedInt8,
    int8_linear,
    int8_linear_torch,
    int8_matmul,
    int8_weight_linear,
    prepack_int8,
    scaled_int8_matmul,
)
from penjing.kernels.quantize import quantize_per_token

SHAPES = [(1, 16, 1), (3, 48, 65), (17, 272, 33), (65, 144, 70), (129, 32, 31)]


def codes(*shape: int, seed: int, device: str) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8).to(device)


def packed(columns: int, inner: int, device: str, with_bias: bool = False) -> PackedInt8:
    generator = torch.Generator().manual_seed(columns)
    scale, bias = torch.rand(columns, generator=generator) / 100, torch.randn(columns, generator=generator)
    weight = codes(columns, inner, seed=columns + inner, device=device)
    return prepack_int8(weight, scale.to(device), bias.to(device) if with_bias else None)


def draw(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_sums_are_exact(gpu_device: str, rows: int, inner: int, columns: int) -> None:
    q, weight = codes(rows, inner, seed=1, device=gpu_device), codes(columns, inner, seed=2, device=gpu_device)
    assert torch.equal(int8_matmul(q, weight).long().cpu(), q.long().cpu() @ weight.long().cpu().t())


def test_more_tiles_than_programs_in_several_groups(gpu_device: str) -> None:
    q, weight = codes(16 * 9, 16, seed=3, device=gpu_device), codes(130, 16, seed=4, device=gpu_device)
    assert torch.equal(int8_matmul(q, weight).long().cpu(), q.long().cpu() @ weight.long().cpu().t())


def test_an_inner_size_that_rows_cannot_be_aligned_to_runs_on_torch(gpu_device: str) -> None:
    q, weight = codes(5, 37, seed=5, device=gpu_device), codes(9, 37, seed=6, device=gpu_device)
    assert torch.equal(int8_matmul(q, weight).long().cpu(), q.long().cpu() @ weight.long().cpu().t())


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_the_linear_layer(gpu_device: str, rows: int, inner: int, columns: int) -> None:
    layer = packed(columns, inner, gpu_device, with_bias=True)
    x = draw(rows, inner, seed=7, device=gpu_device)
    torch.testing.assert_close(int8_linear(x, layer), int8_linear_torch(x, layer), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
def test_epilogues(gpu_device: str, dtype: torch.dtype, with_bias: bool, swiglu: bool, with_residual: bool) -> None:
    rows, inner, columns = 19, 48, 70
    layer = packed(columns, inner, gpu_device, with_bias)
    q, scale = quantize_per_token(draw(rows, inner, seed=8, device=gpu_device))
    out_columns = columns // 2 if swiglu else columns
    residual = draw(rows, out_columns, seed=9, device=gpu_device, dtype=dtype) if with_residual else None
    arguments = {"residual_MN": residual, "swiglu": swiglu, "dtype": dtype}
    actual = scaled_int8_matmul(q, scale, layer, **arguments)
    with force_torch():
        expected = scaled_int8_matmul(q, scale, layer, **arguments)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    static = torch.full((1,), float(expected.float().abs().max()) / 100, device=gpu_device)
    actual_q = scaled_int8_matmul(q, scale, layer, output_scale=static, **arguments)
    with force_torch():
        expected_q = scaled_int8_matmul(q, scale, layer, output_scale=static, **arguments)
    assert actual_q.dtype == torch.int8
    assert (actual_q.int() - expected_q.int()).abs().max() <= 1
    assert (actual_q != expected_q).float().mean() < 0.01


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_int8_weights_with_half_activations(gpu_device: str, rows: int) -> None:
    layer = packed(37, 300, gpu_device, with_bias=True)
    x = draw(rows, 300, seed=10, device=gpu_device, dtype=torch.float16)
    actual = int8_weight_linear(x, layer)
    weight = layer.weight_NK.double() * layer.scale_N.double()[:, None]
    assert layer.bias_N is not None
    expected = x.double() @ weight.t() + layer.bias_N.double()
    same_type = (x @ weight.half().t() + layer.bias_N.half()).double()
    assert actual.dtype == torch.float16
    assert (actual.double() - expected).abs().max() <= 2 * (same_type - expected).abs().max() + 1e-2


def test_a_row_does_not_depend_on_the_batch(gpu_device: str) -> None:
    layer, x = packed(40, 64, gpu_device), draw(70, 64, seed=11, device=gpu_device)
    together = int8_linear(x, layer)
    for row in (0, 33, 69):
        assert torch.equal(int8_linear(x[row : row + 1], layer)[0], together[row])


def test_small_matrices_take_small_tiles() -> None:
    assert tile_of(8192, 8192, 132, with_residual=False) == TILES[0]
    assert tile_of(8192, 8192, 132, with_residual=True) == TILES[1]
    assert tile_of(1, 4096, 132, with_residual=False).block_m == 16
    assert tile_of(48, 4096, 132, with_residual=False).block_m == 64
    assert tile_of(512, 576, 132, with_residual=False) == TILES[3]


def test_refusals(gpu_device: str) -> None:
    layer = packed(7, 16, gpu_device)
    q, scale = codes(2, 16, seed=12, device=gpu_device), torch.ones(2, device=gpu_device)
    with pytest.raises(ValueError, match="even number of outputs, the weight has 7"):
        scaled_int8_matmul(q, scale, layer, swiglu=True)
    with pytest.raises(ValueError, match=r"scale_M is \(2, 1\)"):
        scaled_int8_matmul(q, scale[:, None], layer)
    with pytest.raises(ValueError, match=r"residual_MN is .*float16"):
        scaled_int8_matmul(q, scale, layer, residual_MN=torch.ones(2, 7, device=gpu_device).half())
    with pytest.raises(ValueError, match="int8"):
        scaled_int8_matmul(q.float(), scale, layer)
    assert scaled_int8_matmul(q[:0], scale[:0], layer).shape == (0, 7)
