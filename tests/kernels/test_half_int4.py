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
    given = random_layer(n, k, group, seed=n, dtype=dtype, bias=bias, offsets=offsets)
    return prepack_int4(given.packed_NK8, given.scale_NG, given.bias_N, given.offset_NG, 16)


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
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_do_not_depend_on_the_batch_the_threads_or_the_parts(
    isa: CpuExtension, threads: CpuExtension, count: int, offsets: bool
) -> None:
    packed, x = half_layer(577, 128, 64, offsets=offsets), torch.randn(200, 128, generator=generator(2))
    expected = int4_linear(x, packed)
    threads.set_num_threads(count)
    assert packed.bias_N is not None
    rows = [500, 1, 76]
    split = [tensor.split(rows) for tensor in (packed.packed_NK8, packed.scale_NG, packed.bias_N)]
    moved = [None] * 3 if packed.offset_NG is None else packed.offset_NG.split(rows)
    parts = [(words, scale, offset, bias) for words, scale, bias, offset in zip(*split, moved, strict=True)]
    panels = isa.prepack_int4(parts, 64, half_inputs=True)
    for start, end in ((0, 1), (5, 7), (1, 17), (3, 66), (0, 200), (150, 199)):
        assert torch.equal(isa.int4_linear(x[start:end], panels), expected[start:end])


def test_activations_are_rounded_half_to_even(implementation: str) -> None:
    x = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1e-30, 3e38, 1 + 2**-8 + 2**-20, 0.1]).repeat(4)
    x = torch.stack((x, x.roll(3), x * 0.7))
    one = prepack_int4(pack_int4(torch.eye(32).to(torch.int8)), torch.ones(32, 1), None, None, 16)
    assert torch.equal(int4_linear(x, one), x.bfloat16().float())


@needs_extension
@pytest.mark.parametrize(("m", "k", "inner"), [(1, 64, 16), (3, 32, 24), (20, 192, 150), (130, 64, 70)])
def test_swiglu_epilogue(isa: CpuExtension, m: int, k: int, inner: int) -> None:
    packed = half_layer(2 * inner, k, 32, offsets=True)
    x = torch.randn(m, k, generator=generator(k)) * 2
    gate, up = int4_linear(x, packed).double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    y = isa.int4_linear(x, isa.prepack_int4([packed.part], 32, swiglu=True, half_inputs=True))
    assert ((y - expected).abs() <= expected.abs() * (1e-6 + 1e-7 * gate.abs()) + 1e-34).all()


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
