"""INT8 linear: accumulators equal to int64 numpy, the epilogue against float64, rows independent of the batch."""

import numpy as np
import pytest
import torch

from penjing.kernels import int8_linear as module
from penjing.kernels.dispatch import force_torch
from penjing.kernels.int8_linear import PackedInt8, int8_linear, int8_matmul, prepack_int8
from penjing.kernels.quantize import quantize_above, quantize_per_token

pytestmark = pytest.mark.usefixtures("implementation")
SHAPES = [
    (1, 1, 1),
    (7, 1, 48),
    (1, 576, 1536),
    (2, 31, 7),
    (17, 129, 65),
    (33, 1025, 3),
    (5, 4097, 40),
    (64, 64, 64),
    (7, 200, 513),
]


def random_int8(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


def random_layer(out_features: int, in_features: int, bias: bool, seed: int = 0) -> PackedInt8:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8, generator=generator)
    scale = torch.rand(out_features, generator=generator) * 0.01 + 1e-4
    return prepack_int8(weight, scale, torch.randn(out_features, generator=generator) if bias else None)


def exact(q: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    return q.numpy().astype(np.int64) @ weight.numpy().astype(np.int64).T


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_accumulators_are_exact(m: int, k: int, n: int) -> None:
    q, weight = random_int8(m, k, m + k), random_int8(n, k, n + k + 1)
    acc = int8_matmul(q, weight)
    assert acc.dtype == torch.int32
    np.testing.assert_array_equal(acc.numpy(), exact(q, weight))


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("low", [-128, 127])
def test_accumulators_behind_the_layer_are_exact(m: int, k: int, n: int, low: int) -> None:
    # Rows of integers that reach 127 are their own quantization, and scales of 1 leave the accumulator as it is.
    x = random_int8(m, k, seed=k).clamp_min(-127)
    x[:, 0] = 127
    weight = random_int8(n, k, seed=n).clamp_min(low)
    y = int8_linear(x.float(), prepack_int8(weight, torch.ones(n)))
    np.testing.assert_array_equal(y.numpy(), exact(x, weight).astype(np.float32))


@pytest.mark.parametrize("signs", [(127, 127), (127, -128), (-128, -128), (-128, 127)])
def test_accumulators_do_not_saturate(signs: tuple[int, int]) -> None:
    q, weight = (torch.full((rows, 2050), value, dtype=torch.int8) for rows, value in zip((19, 35), signs, strict=True))
    assert int8_matmul(q, weight).unique().tolist() == [2050 * signs[0] * signs[1]]


def test_the_path_for_processors_that_saturate_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_int_mm_is_exact", lambda: False)
    for m, k, n in SHAPES:
        q, weight = random_int8(m, k, 3), random_int8(n, k, 4)
        np.testing.assert_array_equal(int8_matmul(q, weight).numpy(), exact(q, weight))
    q = torch.full((2, 3072), -128, dtype=torch.int8)
    assert int8_matmul(q, q).unique().tolist() == [3072 * 128 * 128]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_equals_float64(m: int, k: int, n: int, bias: bool) -> None:
    packed = random_layer(n, k, bias, seed=m)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(n)) * 3
    q, scale = quantize_per_token(x)
    product = exact(q, packed.weight_NK) * scale.double().numpy()[:, None] * packed.scale_N.double().numpy()
    expected = product + (packed.bias_N.double().numpy() if packed.bias_N is not None else 0.0)
    y = int8_linear(x, packed)
    assert y.dtype == torch.float32
    # Five float32 roundings: the accumulator, two scales, the bias (relative to the terms, not to their sum).
    bound = 3 * 2.0**-24 * np.abs(product) + 2.0**-24 * np.abs(expected)
    assert (np.abs(y.double().numpy() - expected) <= bound + 1e-30).all()


def test_close_to_the_float_layer() -> None:
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(96, 300, generator=generator), torch.randn(20, 300, generator=generator)
    scale = weight.abs().amax(1) / 127
    packed = prepack_int8(torch.round(weight / scale[:, None]).to(torch.int8), scale)
    expected = x @ weight.t()
    error = (int8_linear(x, packed) - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.02


@pytest.mark.parametrize(("k", "n"), [(576, 192), (1536, 33), (101, 577)])
def test_rows_do_not_depend_on_the_batch(k: int, n: int) -> None:
    packed = random_layer(n, k, bias=True)
    x = torch.randn(65, k, generator=torch.Generator().manual_seed(k))
    together = int8_linear(x, packed)
    for row in range(0, 65, 7):
        assert torch.equal(int8_linear(x[row : row + 1], packed)[0], together[row])
    for size in (2, 3, 16, 31, 64):
        assert torch.equal(int8_linear(x[:size], packed), together[:size])
        assert torch.equal(int8_linear(x[-size:], packed), together[-size:])


def test_the_default_path_agrees_with_torch() -> None:
    packed = random_layer(70, 130, bias=True)
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(8))
    y = int8_linear(x, packed)
    with force_torch():
        torch.testing.assert_close(y, int8_linear(x, packed), rtol=1e-6, atol=1e-6)


def test_no_rows() -> None:
    assert int8_linear(torch.empty(0, 12), random_layer(5, 12, bias=True)).shape == (0, 5)
    layer = random_layer(5, 600, bias=True)
    above = prepack_int8(layer.weight_NK, layer.scale_N, layer.bias_N, zero_points=True)
    assert int8_linear(torch.empty(0, 600), above).shape == (0, 5)


def test_a_damaged_row_harms_no_other() -> None:
    packed = random_layer(8, 16, bias=False)
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(3))
    clean = int8_linear(x, packed)
    x[1, 2] = float("nan")
    y = int8_linear(x, packed)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    assert not y[1].isfinite().any()


def test_weights_that_are_views_pack_right() -> None:
    weight = random_int8(12, 20, seed=6)
    scale = torch.rand(20)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(9))
    packed = prepack_int8(weight.t(), scale[:, None])
    assert torch.equal(int8_linear(x, packed), int8_linear(x, prepack_int8(weight.t().contiguous(), scale)))


@pytest.mark.parametrize(
    ("weight", "scale", "bias", "message"),
    [
        (torch.ones(4, 3), torch.ones(4), None, "int8"),
        (torch.ones(4, dtype=torch.int8), torch.ones(4), None, "int8"),
        (torch.ones(0, 3, dtype=torch.int8), torch.ones(0), None, "int8"),
        (torch.ones(4, 3, dtype=torch.int8), torch.ones(3), None, "scale_N"),
        (torch.ones(4, 3, dtype=torch.int8), torch.ones(4, dtype=torch.int32), None, "scale_N"),
        (torch.ones(4, 3, dtype=torch.int8), torch.ones(4), torch.ones(3), "bias_N"),
    ],
)
def test_prepack_refuses(weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepack_int8(weight, scale, bias)


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 13), torch.ones(2, 12, dtype=torch.int8)])
def test_linear_refuses(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="x_MK"):
        int8_linear(x, random_layer(5, 12, bias=False))


@pytest.mark.parametrize(("m", "k", "n"), [*SHAPES, (130, 96, 33), (9, 256, 20), (7, 257, 48), (40, 1000, 100)])
def test_zero_points_equal_float64(m: int, k: int, n: int) -> None:
    plain = random_layer(n, k, bias=True)
    packed = prepack_int8(plain.weight_NK, plain.scale_N, plain.bias_N, zero_points=True)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).exp()  # all of it above 0
    x[::3] *= -1
    x[::5] = 0
    q, scale, zero = quantize_above(x)
    assert packed.bias_N is not None
    expected = np.zeros((m, n))
    for block, begin in enumerate(range(0, k, 256)):
        inputs = slice(begin, begin + 256)
        sums = exact(q[:, inputs].to(torch.int32) - zero[:, block, None], packed.weight_NK[:, inputs])
        expected += sums.astype(np.float64) * scale[:, block, None].double().numpy()
    expected = expected * packed.scale_N.double().numpy() + packed.bias_N.double().numpy()
    y = int8_linear(x, packed)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    with force_torch():
        assert torch.equal(y, int8_linear(x, packed))


def test_a_damaged_row_above_a_zero_point_is_visible_and_harms_no_other() -> None:
    packed = prepack_int8(random_int8(6, 40, 3), torch.ones(6), zero_points=True)
    x = torch.ones(4, 40)
    x[1, 7], x[2, 9] = float("nan"), float("-inf")
    assert int8_linear(x, packed).isfinite().all(dim=1).tolist() == [True, False, False, True]
