"""4-bit products in the Triton language: the bits of the torch reference, whatever the tile."""

import pytest
import torch
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.gpu.int4_matmul import TILES, step_of, tile_of
from penjing.kernels.int4_linear import (
    PackedInt4,
    int4_linear,
    int4_linear_torch,
    prepack_int4,
    quantize_for_int4,
    scaled_int4_matmul,
)
from tests.kernels.test_int4_linear import random_layer

# (rows, inputs, outputs, group)
SHAPES = [(0, 64, 8, 32), (1, 32, 1, 32), (3, 128, 65, 64), (17, 192, 33, 96), (65, 256, 70, 128), (5, 576, 40, 576)]


def layer_on(device: str, outputs: int, inputs: int, group: int, offsets: bool) -> PackedInt4:
    made = random_layer(outputs, inputs, group, offsets=offsets)
    assert made.bias_N is not None
    offset_NG = None if made.offset_NG is None else made.offset_NG.to(device)
    return prepack_int4(made.packed_NK8.to(device), made.scale_NG.to(device), made.bias_N.to(device), offset_NG)


def draw(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns", "group"), SHAPES)
def test_the_layer_has_the_bits_of_the_reference(
    gpu_device: str, rows: int, inner: int, columns: int, group: int, offsets: bool
) -> None:
    layer, x = layer_on(gpu_device, columns, inner, group, offsets), draw(rows, inner, seed=1, device=gpu_device)
    assert torch.equal(int4_linear(x, layer), int4_linear_torch(x, layer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("offsets", [False, True])
def test_a_residual_is_added_in_float32(gpu_device: str, dtype: torch.dtype, offsets: bool) -> None:
    layer = layer_on(gpu_device, 40, 128, 32, offsets)
    codes, scales = quantize_for_int4(draw(7, 128, seed=2, device=gpu_device), layer)
    residual = draw(7, 40, seed=3, device=gpu_device, dtype=dtype)
    found = scaled_int4_matmul(codes, scales, layer, residual_MN=residual, dtype=dtype)
    with force_torch():
        expected = scaled_int4_matmul(codes, scales, layer, residual_MN=residual, dtype=dtype)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_a_row_does_not_depend_on_the_batch(gpu_device: str) -> None:
    layer, x = layer_on(gpu_device, 40, 64, 32, True), draw(70, 64, seed=4, device=gpu_device)
    together = int4_linear(x, layer)
    for row in (0, 33, 69):
        assert torch.equal(int4_linear(x[row : row + 1], layer)[0], together[row])


def test_small_matrices_take_small_tiles_and_groups_are_cut_into_powers_of_two() -> None:
    assert [tile_of(rows, 8192, 132) for rows in (4096, 64, 16)] == list(TILES)
    assert [step_of(group) for group in (32, 64, 96, 128, 576, 2048)] == [32, 64, 32, 128, 64, 128]


def test_refusals(gpu_device: str) -> None:
    layer = layer_on(gpu_device, 7, 64, 32, True)
    codes, scales = quantize_for_int4(draw(2, 64, seed=5, device=gpu_device), layer)
    with pytest.raises(ValueError, match=r"scale_MG is \(2, 1\) .*\(2, 2\)"):
        scaled_int4_matmul(codes, scales[:, :1], layer)
    with pytest.raises(ValueError, match=r"residual_MN is \(2, 6\)"):
        scaled_int4_matmul(codes, scales, layer, residual_MN=torch.zeros(2, 6, device=gpu_device))
    with pytest.raises(ValueError, match=r"q_MK is \(2, 64\) torch.float32"):
        scaled_int4_matmul(codes.float(), scales, layer)
