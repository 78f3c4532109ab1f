"""quantize, rms_norm, rotary and swiglu in the Triton language against torch and float64, forward and backward."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.dispatch import force_torch
from penjing.kernels.quantize import quantize_per_token, quantize_per_token_torch
from penjing.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantize
from penjing.kernels.rotary import apply_rotary, rotary_cos_sin
from penjing.kernels.swiglu import swiglu, swiglu_quantize

DTYPES = [torch.float32, torch.float16]
ATOL = {torch.float32: 2e-6, torch.float16: 1e-3}
Operation = Callable[..., Tensor]


def draw(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def check(function: Operation, reference: Operation, arguments: Sequence[Tensor], atol: float | None = None) -> None:
    """err ≤ 2 × err(torch, same type) + atol for the result and for each gradient."""
    results = []
    for operation, dtype in ((reference, torch.float64), (reference, None), (function, None)):
        inputs = [argument.detach().to(dtype or argument.dtype).requires_grad_() for argument in arguments]
        out = operation(*inputs)
        upstream = draw(*out.shape, seed=99, device=str(out.device)).to(arguments[0].dtype)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, upstream.to(out.dtype))])
    for expected, same_type, actual in zip(*results, strict=True):
        assert actual.dtype == same_type.dtype
        assert actual.shape == expected.shape
        limit = ATOL[actual.dtype] if atol is None else atol
        bound = 2 * (same_type.double() - expected).abs().max() + limit * max(1.0, float(expected.abs().max()))
        assert (actual.double() - expected).abs().max() <= bound


def rms_norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 17), (37, 63), (5, 1025), (2, 8200)])
def test_codes_and_scales_equal_the_reference(gpu_device: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    x = draw(rows, columns, seed=rows * 31 + columns, device=gpu_device, dtype=dtype)
    x *= torch.logspace(-3, 3, rows, device=gpu_device, dtype=dtype)[:, None]
    for view in (x, draw(columns, rows, seed=5, device=gpu_device, dtype=dtype).t()):
        for actual, expected in zip(quantize_per_token(view), quantize_per_token_torch(view), strict=True):
            assert torch.equal(actual, expected)


def test_rounding_is_half_to_even_and_extremes_keep_their_row(gpu_device: str) -> None:
    ties = torch.tensor([[0.5, 1.5, -2.5, 127.0], [0.0, 0.0, -0.0, 0.0], [1e-45, 0, 0, 0]], device=gpu_device)
    q, scale = quantize_per_token(ties)
    expected, expected_scale = quantize_per_token_torch(ties)
    assert torch.equal(q, expected)
    assert torch.equal(scale, expected_scale)
    for value in (float("inf"), float("nan")):
        x = torch.ones(3, 70, device=gpu_device)
        x[1, 3] = value
        with np.errstate(invalid="ignore"):
            _, scale = quantize_per_token(x)
        assert scale.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (41, 1), (2, 3, 203), (7, 1030)])
def test_rms_norm(gpu_device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, seed=1, device=gpu_device, dtype=dtype) * 3
    weight = draw(shape[-1], seed=2, device=gpu_device, dtype=dtype)
    check(lambda x, weight: rms_norm(x, weight, 1e-5), rms_norm_of, [x, weight])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_sum(gpu_device: str, dtype: torch.dtype) -> None:
    x, residual = (draw(2, 9, 130, seed=seed, device=gpu_device, dtype=dtype) for seed in (3, 4))
    weight = draw(130, seed=5, device=gpu_device, dtype=dtype)

    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat((rms_norm_of(x + residual, weight), x + residual))

    check(lambda x, r, w: torch.cat(add_rms_norm(x, r, w, 1e-5)), reference, [x, residual, weight])
    # Only the sum goes on: the norm has no gradient then.
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(add_rms_norm(x, residual, weight, 1e-5)[1].sum(), x)
    assert gradient.eq(1).all()


def test_a_float32_weight_widens_a_half_result(gpu_device: str) -> None:
    x = draw(5, 64, seed=6, device=gpu_device, dtype=torch.float16)
    weight = draw(64, seed=7, device=gpu_device)
    y = rms_norm(x, weight, 1e-6)
    with force_torch():
        expected = rms_norm(x, weight, 1e-6)
    assert y.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(y, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm_then_quantize(gpu_device: str, with_residual: bool) -> None:
    x, other = (draw(9, 200, seed=seed, device=gpu_device) for seed in (8, 9))
    residual, weight = other if with_residual else None, draw(200, seed=10, device=gpu_device)
    q, scale, total = rms_norm_quantize(x, weight, 1e-5, residual)
    with force_torch():
        expected_q, expected_scale, expected_total = rms_norm_quantize(x, weight, 1e-5, residual)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # A value beside a tie may fall the other way; more than one code apart it may not.
    assert (q.int() - expected_q.int()).abs().max() <= 1
    assert (q != expected_q).float().mean() < 0.01


def test_rows_do_not_depend_on_the_batch(gpu_device: str) -> None:
    x, weight = draw(35, 577, seed=11, device=gpu_device), draw(577, seed=12, device=gpu_device)
    together, codes = rms_norm(x, weight, 1e-6), quantize_per_token(x)[0]
    for row in (0, 3, 34):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])
        assert torch.equal(quantize_per_token(x[row : row + 1])[0][0], codes[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (13, 203), (2, 3, 1500)])
def test_swiglu(gpu_device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate = draw(*shape, seed=13, device=gpu_device, dtype=dtype) * 4
    up = draw(*shape, seed=14, device=gpu_device, dtype=dtype)
    check(swiglu, lambda gate, up: F.silu(gate) * up, [gate, up])


def test_swiglu_of_the_halves_of_one_projection(gpu_device: str) -> None:
    gate, up = draw(6, 100, seed=15, device=gpu_device).chunk(2, dim=1)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    q, scale = swiglu_quantize(gate, up)
    expected, expected_scale = quantize_per_token_torch(swiglu(gate, up))
    assert torch.equal(q, expected)
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 64), (2, 5, 9, 96)])
def test_rotary(gpu_device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    half = shape[-1] // 2
    positions = torch.randint(0, 4000, shape[:-2], generator=torch.Generator().manual_seed(16)).to(gpu_device)
    cos, sin = rotary_cos_sin(10000.0 ** (-torch.arange(half, device=gpu_device) / half), positions)

    def reference(x: Tensor) -> Tensor:
        turn = torch.complex(cos.double(), sin.double())[..., None, :]
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)

    check(lambda x: apply_rotary(x, cos, sin), reference, [draw(*shape, seed=17, device=gpu_device, dtype=dtype)])
    transposed = draw(*shape[:-3], shape[-2], shape[-3], shape[-1], seed=18, device=gpu_device).transpose(-3, -2)
    torch.testing.assert_close(apply_rotary(transposed, cos, sin), reference(transposed))


def test_types_the_kernels_lack_fall_back_to_torch(gpu_device: str) -> None:
    x, weight = draw(3, 8, seed=19, device=gpu_device).double(), torch.ones(8, device=gpu_device, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), rms_norm_of(x, weight), atol=1e-4, rtol=1e-4)
    assert swiglu(x, x).dtype == torch.float64
    assert rms_norm(x[:0].float(), weight.float(), 1e-6).shape == (0, 8)
    assert quantize_per_token(x[:0])[0].shape == (0, 8)


def test_refusals_name_what_does_not_fit(gpu_device: str) -> None:
    x, weight = torch.ones(2, 8, device=gpu_device), torch.ones(8, device=gpu_device)
    with pytest.raises(ValueError, match=r"residual is \(2, 7\)"):
        add_rms_norm(x, x[:, :7], weight, 1e-6)
    with pytest.raises(ValueError, match=r"\(2, 8\).*float16"):
        swiglu_quantize(x, x.half())
    with pytest.raises(ValueError, match=r"\(1, 2, 8\)"):
        rms_norm_quantize(x[None], weight, 1e-6)
