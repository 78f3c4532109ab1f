"""rms_norm, rotary and swiglu against float64, beside torch in the same type; rows independent of the batch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.rms_norm import rms_norm
from penjing.kernels.rotary import apply_rotary, rotary_cos_sin
from penjing.kernels.swiglu import swiglu

pytestmark = pytest.mark.usefixtures("implementation")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ATOL = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(function: Callable[..., Tensor], reference: Callable[..., Tensor], *arguments: Tensor) -> None:
    """err ≤ 2 × err(torch, same type) + atol, where `reference` runs in float64 and in the arguments' type."""
    expected = reference(*(argument.double() for argument in arguments))
    same_type, actual = reference(*arguments), function(*arguments)
    assert actual.dtype == arguments[0].dtype
    assert actual.shape == expected.shape
    bound = 2 * (same_type.double() - expected).abs().max() + ATOL[actual.dtype]
    assert (actual.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (239, 1), (1, 576), (113, 203), (3, 5, 7, 64), (2, 4097)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, seed=1, dtype=dtype) * 4, draw(shape[-1], seed=2, dtype=dtype)
    check(
        lambda x, weight: rms_norm(x, weight, 1e-5),
        lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-5),
        x,
        weight,
    )


@pytest.mark.parametrize("columns", [64, 576, 577, 4096, 16384])
def test_rms_norm_rows_do_not_depend_on_the_batch(columns: int) -> None:
    x, weight = draw(33, columns, seed=3), draw(columns, seed=4)
    together = rms_norm(x, weight, 1e-6)
    for row in (0, 1, 16, 32):
        assert torch.equal(rms_norm(x[row], weight, 1e-6), together[row])
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], together[row])
    assert torch.equal(rms_norm(x[3:14], weight, 1e-6), together[3:14])


def test_rms_norm_of_zeros_is_zero() -> None:
    assert rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (17, 3, 64), (2, 5, 7, 10)])
def test_rotary_turns_pairs_of_dimensions(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    half = shape[-1] // 2
    angle = draw(*shape[:-2], half, seed=5)

    def complex_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn = torch.complex(cos.double(), sin.double())[..., None, :]
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat((turned.real, turned.imag), dim=-1).to(x.dtype)

    arguments = (draw(*shape, seed=6, dtype=dtype), angle.cos().to(dtype), angle.sin().to(dtype))
    check(apply_rotary, complex_rotation, *arguments)


def test_rotary_scores_depend_on_distance_only() -> None:
    frequency = 10000.0 ** (-torch.arange(32) / 32)
    q, k = draw(1, 1, 64, seed=7), draw(1, 1, 64, seed=8)

    def score(query_position: int, key_position: int) -> Tensor:
        turned = [
            apply_rotary(x, *rotary_cos_sin(frequency, torch.tensor([position])))
            for x, position in ((q, query_position), (k, key_position))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(9, 2), score(1009, 1002), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(score(9, 2), score(9, 3), rtol=1e-3)
    torch.testing.assert_close(score(0, 0), (q * k).sum())


def test_rotary_angles_do_not_depend_on_the_batch() -> None:
    frequency = 10000.0 ** (-torch.arange(5) / 5)
    positions = torch.randint(0, 8192, (997,), generator=torch.Generator().manual_seed(13))
    cos, sin = rotary_cos_sin(frequency, positions)
    for row in range(0, 997, 31):
        alone = rotary_cos_sin(frequency, positions[row : row + 1])
        assert torch.equal(alone[0][0], cos[row])
        assert torch.equal(alone[1][0], sin[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (113, 203), (3, 5, 1536)])
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = draw(*shape, seed=9, dtype=dtype) * 5, draw(*shape, seed=10, dtype=dtype)
    check(swiglu, lambda gate, up: gate * torch.sigmoid(gate) * up, gate, up)


def test_swiglu_far_from_zero() -> None:
    gate = torch.tensor([-1e4, -100.0, 100.0, 1e4])
    assert swiglu(gate, torch.ones(4)).tolist() == [0.0, pytest.approx(0.0, abs=1e-40), 100.0, 1e4]


def test_swiglu_rows_do_not_depend_on_the_batch() -> None:
    gate, up = draw(33, 1531, seed=11), draw(33, 1531, seed=12)
    together = swiglu(gate, up)
    for row in (0, 7, 32):
        assert torch.equal(swiglu(gate[row : row + 1], up[row : row + 1])[0], together[row])


def test_refusals_name_the_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(7,\)"):
        rms_norm(torch.ones(2, 8), torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"\(2, 8\).*\(2, 7\)"):
        swiglu(torch.ones(2, 8), torch.ones(2, 7))
    with pytest.raises(ValueError, match=r"\(5, 2, 8\).*\(5, 3\)"):
        apply_rotary(torch.ones(5, 2, 8), torch.ones(5, 3), torch.ones(5, 3))
