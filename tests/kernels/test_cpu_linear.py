"""C++ quantization and linear layers on every instruction set: bits equal to the torch reference and to int64 sums."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.int8_linear import int8_linear_torch, prepack_int8
from penjing.kernels.quantize import quantize_per_token_torch
from tests.kernels.cpu import needs_extension, the_extension

pytestmark = needs_extension

# Panels are 32, 48 or 64 columns wide, k is padded to 4, micro-tiles hold up to 8 rows.
SHAPES = [
    (1, 1, 1),
    (1, 576, 192),
    (2, 31, 7),
    (17, 129, 65),
    (33, 1025, 3),
    (5, 2049, 48),
    (64, 64, 64),
    (7, 200, 113),
]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_layer(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = generator(seed)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=g)
    return weight, torch.rand(n, generator=g) * 0.01 + 1e-4, torch.randn(n, generator=g)


@pytest.mark.parametrize("k", [1, 3, 16, 17, 64, 576, 1001])
def test_quantization_equals_torch(isa: CpuExtension, k: int) -> None:
    g = generator(k)
    x = torch.randn(50, k, generator=g) * torch.logspace(-30, 30, 50)[:, None]
    x[3] = 0
    x[4, 0], x[5] = 1e-44, 1e-44  # the scale underflows to 0
    # Ties: multiples of one half under a scale of exactly 1.
    x[6:20] = torch.randint(-253, 254, (14, k), generator=g) / 2
    x[6:20, 0] = 127
    q, scale = isa.quantize_per_token(x)
    expected_q, expected_scale = quantize_per_token_torch(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q, expected_q)


def test_quantization_near_halves_equals_torch(isa: CpuExtension) -> None:
    g = generator(0)
    amax = torch.rand(200, 1, generator=g) * torch.logspace(-30, 30, 200)[:, None]
    x = torch.randint(-127, 127, (200, 600), generator=g).add(0.5) * (amax / 127)
    x = (x.view(torch.int32) + torch.randint(-4, 5, x.shape, generator=g, dtype=torch.int32)).view(torch.float32)
    x[:, :1] = amax
    q, scale = isa.quantize_per_token(x)
    expected_q, expected_scale = quantize_per_token_torch(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(q, expected_q)


@pytest.mark.parametrize(("m", "k"), [(1, 576), (3, 1), (50, 577), (7, 5000), (0, 64)])
def test_fused_quantization_equals_its_parts(isa: CpuExtension, m: int, k: int) -> None:
    g = generator(m)
    x, other, weight = torch.randn(m, k, generator=g) * 5, torch.randn(m, k, generator=g), torch.rand(k, generator=g)
    fused = isa.rms_norm_quantize(x, weight, 1e-5), isa.swiglu_quantize(x, other)
    parts = isa.rms_norm(x, weight, 1e-5), isa.swiglu(x, other)
    for (q, scale), y in zip(fused, parts, strict=True):
        expected_q, expected_scale = quantize_per_token_torch(y)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(q, expected_q)
    with pytest.raises(ValueError, match="up_MK"):
        isa.swiglu_quantize(x, torch.zeros(m + 1, k))
    with pytest.raises(ValueError, match="x_MK"):
        isa.rms_norm_quantize(x, torch.zeros(k + 1), 1e-5)


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 37])
def test_a_damaged_row_harms_no_other(isa: CpuExtension, damage: float, at: int) -> None:
    weight, scale, bias = random_layer(40, 38)
    panels = isa.prepack_int8(weight, scale, bias)
    x = torch.randn(9, 38, generator=generator(1))
    clean = isa.int8_linear(x, panels)
    x[4, at] = damage
    y = isa.int8_linear(x, panels)
    assert not y[4].isfinite().any()
    assert torch.equal(y[torch.arange(9) != 4], clean[torch.arange(9) != 4])


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_accumulators_are_exact(isa: CpuExtension, m: int, k: int, n: int) -> None:
    weight, _, _ = random_layer(n, k, seed=m)
    x = torch.randint(-127, 128, (m, k), generator=generator(n)).float()
    x[:, 0] = 127  # scale 1: the result is the accumulator
    y = isa.int8_linear(x, isa.prepack_int8(weight, torch.ones(n)))
    assert torch.equal(y, (x.long() @ weight.long().t()).float())


@pytest.mark.parametrize("weight", [127, -128])
@pytest.mark.parametrize("x", [127, -127])
def test_accumulators_do_not_saturate(isa: CpuExtension, weight: int, x: int) -> None:
    # 70 000 products leave int32 when the activations are biased by 128; the compensation brings them back.
    k = 70_000
    panels = isa.prepack_int8(torch.full((2, k), weight, dtype=torch.int8), torch.ones(2))
    assert (
        isa.int8_linear(torch.full((3, k), float(x)), panels).unique().tolist()
        == torch.tensor([k * weight * x]).float().tolist()
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_int8_linear_equals_torch(isa: CpuExtension, m: int, k: int, n: int, bias: bool) -> None:
    weight, scale, bias_N = random_layer(n, k, seed=m + k)
    x = torch.randn(m, k, generator=generator(k)) * 3
    expected = int8_linear_torch(x, prepack_int8(weight, scale, bias_N if bias else None))
    assert torch.equal(isa.int8_linear(x, isa.prepack_int8(weight, scale, bias_N if bias else None)), expected)


@pytest.mark.parametrize(("m", "k", "inner"), [(1, 64, 16), (3, 20, 24), (20, 200, 150), (5, 64, 33), (130, 33, 70)])
def test_swiglu_epilogue(isa: CpuExtension, m: int, k: int, inner: int) -> None:
    weight, scale, bias = random_layer(2 * inner, k, seed=m)
    x = torch.randn(m, k, generator=generator(k)) * 2
    gate, up = int8_linear_torch(x, prepack_int8(weight, scale, bias)).double().chunk(2, dim=1)
    expected = F.silu(gate) * up
    y = isa.int8_linear(x, isa.prepack_int8(weight, scale, bias, swiglu=True))
    assert ((y - expected).abs() <= expected.abs() * (1e-6 + 1e-7 * gate.abs()) + 1e-34).all()


@pytest.mark.parametrize("swiglu", [False, True])
def test_parts_are_packed_as_one(isa: CpuExtension, swiglu: bool) -> None:
    whole = random_layer(90, 38)
    rows = [45, 45] if swiglu else [64, 1, 25]
    parts = list(zip(*(tensor.split(rows) for tensor in whole), strict=True))
    expected = isa.prepack_int8(*whole, swiglu=swiglu)
    assert torch.equal(isa.prepack_parts(parts, swiglu=swiglu).memory, expected.memory)
    x = torch.randn(3, 38, generator=generator(3))
    some = isa.prepack_parts([(weight, scale, None if i else bias) for i, (weight, scale, bias) in enumerate(parts)])
    bias = torch.cat([whole[2][: rows[0]], torch.zeros(90 - rows[0])])
    assert torch.equal(isa.int8_linear(x, some), int8_linear_torch(x, prepack_int8(*whole[:2], bias)))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_rows_do_not_depend_on_the_batch_or_the_threads(isa: CpuExtension, threads: CpuExtension, count: int) -> None:
    weight, scale, bias = random_layer(577, 101)
    panels, x = isa.prepack_int8(weight, scale, bias), torch.randn(300, 101, generator=generator(2))
    expected = int8_linear_torch(x, prepack_int8(weight, scale, bias))
    threads.set_num_threads(count)
    assert torch.equal(isa.prepack_int8(weight, scale, bias).memory.view(-1).sum(), panels.memory.view(-1).sum())
    for start, end in ((0, 1), (5, 7), (1, 17), (3, 66), (0, 300), (150, 299)):
        assert torch.equal(isa.int8_linear(x[start:end], panels), expected[start:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_float_linear(isa: CpuExtension, m: int, k: int, n: int, dtype: torch.dtype) -> None:
    g = generator(m + k)
    x, weight, bias = torch.randn(m, k, generator=g), torch.randn(n, k, generator=g).to(dtype), torch.randn(n)
    expected = F.linear(x.double(), weight.double(), bias.double())
    error = (isa.linear(x, weight, bias) - expected).abs().max()
    assert error <= 2 * (F.linear(x, weight.float(), bias) - expected).abs().max() + 1e-6
    # The rows are those of any other batch, bit by bit.
    together = isa.linear(x, weight, bias)
    for start, end in ((0, 1), (m // 2, m), (m - 1, m)):
        assert torch.equal(isa.linear(x[start:end], weight, bias), together[start:end])


def test_half_precision_weights_widen_exactly(isa: CpuExtension) -> None:
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        weight = bits.view(dtype)
        weight = weight[weight.isfinite()].view(-1, 1)
        assert torch.equal(isa.linear(torch.ones(1, 1), weight)[0], weight.float()[:, 0])


@pytest.mark.parametrize("k", [1, 15, 16, 576, 1000])
def test_rms_norm(isa: CpuExtension, k: int) -> None:
    x, weight = torch.randn(5, k, generator=generator(k)) * 4, torch.randn(k, generator=generator(1))
    expected = F.rms_norm(x.double(), (k,), weight.double(), 1e-5)
    error = (isa.rms_norm(x, weight, 1e-5) - expected).abs().max()
    assert error <= 2 * (F.rms_norm(x, (k,), weight, 1e-5) - expected).abs().max() + 1e-6


def test_swiglu(isa: CpuExtension) -> None:
    gate = torch.cat([torch.linspace(-120, 120, 9999), torch.tensor([-1e4, 1e4, 0.0, -0.0])])
    up = torch.randn(len(gate), generator=generator(3))
    expected = F.silu(gate.double()) * up
    # The exponent is rounded once, in units of the argument.
    bound = expected.abs() * (1e-6 + 1e-7 * gate.abs()) + 1e-34
    assert ((isa.swiglu(gate, up) - expected).abs() <= bound).all()


@pytest.mark.parametrize("head_dim", [2, 30, 64, 80])
def test_rotation(isa: CpuExtension, head_dim: int) -> None:
    x = torch.randn(7, 3, head_dim, generator=generator(4))
    angle = torch.randn(7, head_dim // 2, generator=generator(5))
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)[:, None].to(
        torch.complex128
    )
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(isa.rotate(x, angle.cos(), angle.sin()).double(), expected, rtol=1e-5, atol=1e-6)


def test_no_rows() -> None:
    kernels = the_extension()
    assert kernels.int8_linear(
        torch.empty(0, 4), kernels.prepack_int8(torch.ones(3, 4).char(), torch.ones(3))
    ).shape == (0, 3)
    assert kernels.linear(torch.empty(0, 4), torch.ones(3, 4)).shape == (0, 3)


def test_other_float_types_are_widened() -> None:
    kernels, (weight, scale, bias) = the_extension(), random_layer(20, 30)
    panels, x = kernels.prepack_int8(weight, scale, bias), torch.randn(4, 30, generator=generator(6)).half()
    assert torch.equal(kernels.int8_linear(x, panels), kernels.int8_linear(x.float(), panels))
    assert torch.equal(kernels.int8_linear(x.t().contiguous().t(), panels), kernels.int8_linear(x, panels))


@pytest.mark.parametrize(
    ("weight", "scale", "bias", "swiglu", "message"),
    [
        (torch.ones(4, 3), torch.ones(4), None, False, "weight_NK.*int8"),
        (torch.ones(0, 3).char(), torch.ones(0), None, False, "non-empty"),
        (torch.ones(3, 3).char(), torch.ones(3), None, True, "as many each"),
        (torch.ones(4, 3).char(), torch.ones(3), None, False, "scale_N"),
        (torch.ones(4, 3).char(), torch.ones(4).double(), None, False, "scale_N"),
        (torch.ones(4, 3).char(), torch.ones(4), torch.ones(5), False, "bias_N"),
        (torch.ones(3, 4).char().t(), torch.ones(4), None, False, "contiguous"),
    ],
)
def test_packing_refuses(weight: Tensor, scale: Tensor, bias: Tensor | None, swiglu: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        the_extension().prepack_int8(weight, scale, bias, swiglu=swiglu)


@pytest.mark.parametrize(
    "x", [torch.ones(3), torch.ones(2, 5), torch.ones(2, 4).int(), torch.ones(2, 4, device="meta")]
)
def test_layers_refuse(x: Tensor) -> None:
    kernels = the_extension()
    panels = kernels.prepack_int8(torch.ones(3, 4).char(), torch.ones(3))
    for call in (lambda: kernels.int8_linear(x, panels), lambda: kernels.linear(x, torch.ones(3, 4))):
        with pytest.raises(ValueError, match="x_MK"):
            call()
    with pytest.raises(ValueError, match="weight_NK"):
        kernels.linear(torch.ones(2, 4), torch.ones(3, 4).double())
