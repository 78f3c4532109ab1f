"""INT4 layers of bfloat16 activations: beside double precision, with equal bits on every instruction set."""

import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu.functions import ISAS, CpuExtension
from penjing.kernels.dispatch import force_torch
from penjing.kernels.int4_linear import (
    PackedInt4,
    int4_linear,
    int4_linear_torch,
    pack_int4,
    prepack_int4,
    quantize_for_int4,
)
from tests.kernels.cpu import needs_extension
from tests.kernels.test_int4_linear import SCALES, SHAPES, generator, random_layer


def half_layer(
    n: int, k: int, group: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True, offsets: bool = False
) -> PackedInt4:
    return random_layer(n, k, group, seed=n, dtype=dtype, bias=bias, offsets=offsets, activation_bits=16)


def wide(x: Tensor, packed: PackedInt4) -> tuple[Tensor, Tensor]:
    """The layer in double precision, and the sizes of its terms added up, which bound what float32 loses."""
    rounded, weight = x.bfloat16().double(), packed.dequantize().double()
    bias = 0.0 if packed.bias_N is None else packed.bias_N.double()
    return rounded @ weight.t() + bias, rounded.abs() @ (weight.abs() + 8 * packed.scale_NG.double().amax()).t() + 1


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize(("m", "k", "n", "group"), SHAPES)
def test_is_the_product_of_rounded_activations(
    implementation: str, m: int, k: int, n: int, group: int, dtype: torch.dtype, offsets: bool
) -> None:
    packed = half_layer(n, k, group, dtype, bias=m % 2 == 0, offsets=offsets)
    x = torch.randn(m, k, generator=generator(k)) * 3
    expected, size = wide(x, packed)
    assert ((int4_linear(x, packed) - expected).abs() <= 1e-6 * size).all()


@needs_extension
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("m", "k", "n", "group"), SHAPES)
def test_every_instruction_set_gives_the_same_bits(
    isa: CpuExtension, m: int, k: int, n: int, group: int, offsets: bool
) -> None:
    packed, x = half_layer(n, k, group, offsets=offsets), torch.randn(m, k, generator=generator(k)) * 3
    found = int4_linear(x, packed)
    isa.select_isa("scalar")
    assert torch.equal(found, int4_linear(x, packed))


@needs_extension
@pytest.mark.parametrize("size", [2.0**-140, 2.0**-126, 2.0**-119, 2.0**-112, 2.0**120])
def test_tiny_and_huge_activations_give_the_same_bits_too(isa: CpuExtension, size: float) -> None:
    """AVX-512's BF16 instruction takes subnormal inputs and sums for 0."""
    packed, x = half_layer(65, 256, 64, offsets=True, bias=False), torch.randn(9, 256, generator=generator(3)) * size
    found = int4_linear(x, packed)
    isa.select_isa("scalar")
    expected = int4_linear(x, packed)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert bool(expected.any()) == (size > 2.0**-126)


def test_activations_are_rounded_half_to_even(implementation: str) -> None:
    x = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1e-30, 3e38, 1 + 2**-8 + 2**-20, 0.1]).repeat(4)
    x = torch.stack((x, x.roll(3), x * 0.7))
    one = prepack_int4(pack_int4(torch.eye(32).to(torch.int8)), torch.ones(32, 1), None, None, 16)
    assert torch.equal(int4_linear(x, one), x.bfloat16().float())


@needs_extension
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_damaged_row_harms_no_other(isa: CpuExtension, damage: float, offsets: bool) -> None:
    packed, x = half_layer(40, 64, 32, offsets=offsets), torch.randn(9, 64, generator=generator(1))
    clean = int4_linear(x, packed)
    x[4, 37] = damage
    y = int4_linear(x, packed)
    assert not y[4].isfinite().all()
    if damage is torch.nan:
        assert y[4].isnan().all()
    assert torch.equal(y[torch.arange(9) != 4], clean[torch.arange(9) != 4])


def test_codes_of_activations_are_refused() -> None:
    packed, x = half_layer(5, 32, 32), torch.randn(4, 32, generator=generator(6))
    with pytest.raises(ValueError, match="floating: it has no product of codes"):
        quantize_for_int4(x, packed)
    with force_torch():
        assert torch.equal(int4_linear(x, packed), int4_linear_torch(x, packed))
        assert torch.equal(int4_linear(x[:1], packed), int4_linear(x, packed)[:1])


def test_bf16_stands_before_vnni() -> None:
    assert ISAS.index("avx512_bf16") < ISAS.index("avx512_vnni")
