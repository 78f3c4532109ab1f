"""The Hadamard transform: compressed-tensors' matrix, its own inverse, the same bits from torch and every C++ table."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.dispatch import force_torch
from penjing.kernels.hadamard import hadamard

BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256)


@pytest.mark.parametrize("block", BLOCKS)
def test_it_multiplies_blocks_with_the_matrix(block: int) -> None:
    x = torch.randn(3, 5, 3 * block, generator=torch.Generator().manual_seed(block))
    dense = deterministic_hadamard_matrix(block, torch.float64) / block**0.5
    expected = (x.double().unflatten(-1, (3, block)) @ dense).flatten(-2)
    torch.testing.assert_close(hadamard(x, block).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(x, block), block), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_way_gives_the_same_bits(block: int, isa: CpuExtension) -> None:
    x = torch.randn(7, 2 * block, generator=torch.Generator().manual_seed(block)) * 100
    found = isa.hadamard(x, block)
    with force_torch():
        assert torch.equal(found, hadamard(x, block))
    assert torch.equal(found[2:3], isa.hadamard(x[2:3].clone(), block))


def test_gradients_pass_the_matrix_back() -> None:
    x = torch.randn(4, 32, dtype=torch.float32, requires_grad=True)
    upstream = torch.randn(4, 32)
    hadamard(x, 32).backward(upstream)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, hadamard(upstream, 32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("shape", "block"), [((4, 24), 16), ((4, 24), 12), ((4, 24), 1), ((4, 1024), 512), ((), 2)])
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], block: int) -> None:
    with pytest.raises(ValueError, match="needed"):
        hadamard(torch.zeros(shape), block)


def test_empty_and_half_precision_inputs() -> None:
    assert hadamard(torch.zeros(0, 64), 64).shape == (0, 64)
    half = torch.randn(3, 64).bfloat16()
    assert torch.equal(hadamard(half, 64), hadamard(half.float(), 64))
