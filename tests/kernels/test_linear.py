"""Float32 linear: the error of torch's own, and rows that do not depend on the batch."""

import pytest
import torch
import torch.nn.functional as F

from penjing.kernels.linear import linear

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (3, 17, 5), (16, 64, 64), (33, 577, 100), (100, 31, 1025)])
@pytest.mark.parametrize("bias", [False, True])
def test_error_is_that_of_torch(m: int, k: int, n: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(m + k + n)
    x, weight = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    bias_N = torch.randn(n, generator=generator) if bias else None
    expected = F.linear(x.double(), weight.double(), None if bias_N is None else bias_N.double())
    error = (linear(x, weight, bias_N) - expected).abs().max()
    assert error <= 2 * (F.linear(x, weight, bias_N) - expected).abs().max() + 1e-6


@pytest.mark.parametrize(("k", "n"), [(576, 192), (1536, 65), (64, 4099), (33, 7)])
def test_rows_do_not_depend_on_the_batch(k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(k)
    x, weight = torch.randn(130, k, generator=generator), torch.randn(n, k, generator=generator)
    together = linear(x, weight)
    for row in (0, 1, 5, 15, 16, 31, 77, 129):
        assert torch.equal(linear(x[row : row + 1], weight)[0], together[row])
    for start, end in ((0, 2), (1, 12), (3, 19), (7, 64), (2, 130), (64, 129)):
        assert torch.equal(linear(x[start:end], weight), together[start:end])
    order = torch.randperm(130, generator=generator)
    assert torch.equal(linear(x[order], weight), together[order])


def test_no_rows() -> None:
    assert linear(torch.empty(0, 3), torch.ones(4, 3)).shape == (0, 4)


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (torch.ones(3), torch.ones(4, 3), None, "do not fit"),
        (torch.ones(2, 3), torch.ones(4, 5), None, "do not fit"),
        (torch.ones(2, 3), torch.ones(4, 3), torch.ones(3), "bias"),
        (torch.ones(2, 3).half(), torch.ones(4, 3), None, "float32"),
        (torch.ones(2, 3).double(), torch.ones(4, 3).double(), None, "float32"),
    ],
)
def test_refuses(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, weight, bias)
