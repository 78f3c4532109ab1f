"""INT4 linear layers on every instruction set: sums equal to int64 numpy, bits equal to the torch reference, layouts
equal to compressed-tensors'."""

import numpy as np
import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu.functions import CpuExtension
from penjing.kernels.dispatch import force_torch
from penjing.kernels.int4_linear import (
    ActivationBits,
    PackedInt4,
    int4_linear,
    int4_linear_torch,
    pack_int4,
    prepack_int4,
    unpack_int4,
)
from penjing.kernels.quantize import quantize_per_token_torch
from tests.kernels.cpu import needs_extension, the_extension

# (rows, inputs, outputs, group): panels are 32 or 64 columns wide, micro-tiles hold up to 8 rows.
SHAPES = [
    (1, 32, 1, 32),
    (1, 576, 192, 64),
    (2, 192, 113, 32),
    (4, 96, 48, 32),
    (7, 192, 113, 32),
    (9, 96, 48, 96),
    (17, 256, 65, 128),
    (33, 1024, 80, 64),
    (130, 64, 70, 64),
]
SCALES = [torch.float32, torch.bfloat16, torch.float16]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_weight(n: int, k: int, seed: int = 0) -> Tensor:
    return torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=generator(seed))


def random_layer(
    n: int,
    k: int,
    group: int,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    offsets: bool = False,
    activation_bits: ActivationBits = 8,
) -> PackedInt4:
    g = generator(seed + 1)
    scale = (torch.rand(n, k // group, generator=g) * 0.01 + 1e-4).to(dtype)
    bias_N = torch.randn(n, generator=g) if bias else None
    offset = (torch.randn(n, k // group, generator=g) * 0.05).to(dtype) if offsets else None
    return prepack_int4(pack_int4(random_weight(n, k, seed)), scale, bias_N, offset, activation_bits)


def test_words_are_those_of_compressed_tensors() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    weight = random_weight(5, 96)
    words = helpers.pack_to_int32(weight, 4)
    assert torch.equal(pack_int4(weight), words)
    assert torch.equal(unpack_int4(words), weight)
    assert torch.equal(helpers.unpack_from_int32(pack_int4(weight), 4, weight.shape), weight)


@needs_extension
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize(("m", "k", "n", "group"), SHAPES)
def test_equals_torch(isa: CpuExtension, m: int, k: int, n: int, group: int, dtype: torch.dtype, offsets: bool) -> None:
    packed = random_layer(n, k, group, seed=m + k, dtype=dtype, bias=m % 2 == 0, offsets=offsets)
    x = torch.randn(m, k, generator=generator(k)) * 3
    panels = isa.prepack_int4([packed.part], group)
    assert torch.equal(isa.int4_linear(x, panels), int4_linear_torch(x, packed))


@pytest.mark.parametrize(("m", "k", "n", "group"), SHAPES)
def test_the_reference_is_the_sum_of_exact_groups(m: int, k: int, n: int, group: int) -> None:
    packed, x = random_layer(n, k, group, seed=n), torch.randn(m, k, generator=generator(n)) * 2
    q, row_scale = quantize_per_token_torch(x)
    weight, scale = unpack_int4(packed.packed_NK8).numpy().astype(np.int64), packed.scale_NG.float().numpy()
    y = np.zeros((m, n), dtype=np.float32)
    for index in range(k // group):
        part = slice(index * group, (index + 1) * group)
        y = y + (q.numpy().astype(np.int64)[:, part] @ weight[:, part].T).astype(np.float32) * scale[:, index]
    assert packed.bias_N is not None
    expected = y * row_scale.numpy()[:, None] + packed.bias_N.numpy()
    np.testing.assert_array_equal(int4_linear_torch(x, packed).numpy(), expected)
    np.testing.assert_array_equal(int4_linear(x, packed).numpy(), expected)


@pytest.mark.parametrize(("m", "k", "n", "group"), SHAPES)
def test_with_offsets_the_reference_is_a_product_of_rounded_groups(m: int, k: int, n: int, group: int) -> None:
    packed, x = random_layer(n, k, group, seed=n, offsets=True), torch.randn(m, k, generator=generator(n)) * 2
    assert packed.bias_N is not None
    assert packed.offset_NG is not None
    groups = x.double().unflatten(1, (-1, group))
    scale = groups.abs().amax(2, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).flatten(1)
    unsigned = (unpack_int4(packed.packed_NK8).double() + 8).unflatten(1, (-1, group))
    weight = (unsigned * packed.scale_NG.double()[..., None] + packed.offset_NG.double()[..., None]).flatten(1)
    expected = rounded @ weight.t() + packed.bias_N.double()
    torch.testing.assert_close(int4_linear_torch(x, packed).double(), expected, rtol=1e-5, atol=1e-4)


def test_a_weight_of_q4_1_is_exact() -> None:
    quants = pytest.importorskip("gguf.quants")
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_1
    blocks = quants.quantize(torch.randn(6, 64, generator=generator(3)).numpy(), kind)
    theirs = torch.from_numpy(quants.dequantize(blocks, kind))
    halves = torch.from_numpy(blocks.reshape(6, 2, 20)[:, :, :4].copy()).view(torch.float16)
    nibbles = torch.from_numpy(blocks.reshape(6, 2, 20)[:, :, 4:].copy())
    values = torch.cat([nibbles & 15, nibbles >> 4], dim=2).flatten(1).to(torch.int8) - 8
    scale, offset = halves[..., 0].contiguous(), halves[..., 1].contiguous()
    packed = prepack_int4(pack_int4(values), scale, None, offset)
    one_hot = torch.eye(64)
    torch.testing.assert_close(int4_linear(one_hot, packed).t(), theirs, rtol=1e-6, atol=1e-6)


@needs_extension
@pytest.mark.parametrize("value", [-8, 7])
@pytest.mark.parametrize("x", [127, -127])
def test_sums_do_not_saturate(isa: CpuExtension, value: int, x: int) -> None:
    k = 8192
    weight = torch.full((2, k), value, dtype=torch.int8)
    packed = pack_int4(weight)
    panels = isa.prepack_int4([(packed, torch.ones(2, 1), None, None)], k)
    assert isa.int4_linear(torch.full((3, k), float(x)), panels).unique().tolist() == [k * value * x]
    panels = isa.prepack_int4([(packed, torch.ones(2, 1), torch.zeros(2, 1), None)], k)
    assert isa.int4_linear(torch.full((3, k), float(x)), panels).unique().tolist() == [k * (value + 8) * x]


@needs_extension
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("m", "k", "inner"), [(1, 64, 16), (3, 32, 24), (20, 192, 150), (130, 64, 70)])
def test_swiglu_epilogue(isa: CpuExtension, m: int, k: int, inner: int, bits: ActivationBits) -> None:
    packed = random_layer(2 * inner, k, 32, seed=m, activation_bits=bits)
    x = torch.randn(m, k, generator=generator(k)) * 2
    gate, up = int4_linear(x, packed).double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    y = isa.int4_linear(x, isa.prepack_int4([packed.part], 32, swiglu=True, half_inputs=bits == 16))
    assert ((y - expected).abs() <= expected.abs() * (1e-6 + 1e-7 * gate.abs()) + 1e-34).all()


@needs_extension
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_do_not_depend_on_the_batch_the_threads_or_the_parts(
    isa: CpuExtension, threads: CpuExtension, count: int, offsets: bool, bits: ActivationBits
) -> None:
    packed = random_layer(577, 128, 64, offsets=offsets, activation_bits=bits)
    x = torch.randn(200, 128, generator=generator(2))
    expected = int4_linear(x, packed)
    threads.set_num_threads(count)
    assert packed.bias_N is not None
    rows = [500, 1, 76]
    split = [tensor.split(rows) for tensor in (packed.packed_NK8, packed.scale_NG, packed.bias_N)]
    moved = [None] * 3 if packed.offset_NG is None else packed.offset_NG.split(rows)
    parts = [(words, scale, offset, bias) for words, scale, bias, offset in zip(*split, moved, strict=True)]
    panels = isa.prepack_int4(parts, 64, half_inputs=bits == 16)
    for start, end in ((0, 1), (5, 7), (1, 17), (3, 66), (0, 200), (150, 199)):
        assert torch.equal(isa.int4_linear(x[start:end], panels), expected[start:end])


@needs_extension
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_damaged_row_harms_no_other(isa: CpuExtension, damage: float, offsets: bool) -> None:
    packed, x = random_layer(40, 64, 32, offsets=offsets), torch.randn(9, 64, generator=generator(1))
    panels = isa.prepack_int4([packed.part], 32)
    clean = isa.int4_linear(x, panels)
    x[4, 37] = damage
    y = isa.int4_linear(x, panels)
    assert not y[4].isfinite().any()
    assert torch.equal(y[torch.arange(9) != 4], clean[torch.arange(9) != 4])


def test_no_rows_and_other_float_types() -> None:
    packed = random_layer(5, 32, 32)
    assert int4_linear(torch.empty(0, 32), packed).shape == (0, 5)
    x = torch.randn(4, 32, generator=generator(6)).half()
    assert torch.equal(int4_linear(x, packed), int4_linear(x.float(), packed))
    with force_torch():
        assert torch.equal(int4_linear(x, packed), int4_linear(x.float(), packed))


WORDS = pack_int4(torch.ones(4, 64, dtype=torch.int8))


@pytest.mark.parametrize(
    ("words", "scale", "bias", "message"),
    [
        (WORDS.long(), torch.ones(4, 2), None, "int32"),
        (WORDS[:0], torch.ones(0, 2), None, "int32"),
        (WORDS, torch.ones(3, 2), None, "scale_NG"),
        (WORDS, torch.ones(4), None, "scale_NG"),
        (WORDS, torch.ones(4, 2).double(), None, "scale_NG"),
        (WORDS, torch.ones(4, 3), None, "64 inputs in 3 groups"),
        (WORDS, torch.ones(4, 4), None, "multiple of 32"),
        (WORDS, torch.full((4, 2), torch.inf), None, "overflowed"),
        (WORDS, torch.ones(4, 2), torch.ones(3), "bias_N"),
    ],
)
def test_prepack_refuses(words: Tensor, scale: Tensor, bias: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepack_int4(words, scale, bias)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (torch.ones(4, 1), "offset_NG"),
        (torch.ones(4, 2).half(), "offset_NG"),
        (torch.full((4, 2), torch.nan), "overflowed"),
    ],
)
def test_prepack_refuses_offsets(offset: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepack_int4(WORDS, torch.ones(4, 2), None, offset)


@needs_extension
def test_parts_with_offsets_and_without_are_not_packed_as_one() -> None:
    parts = [(WORDS, torch.ones(4, 2), offset, None) for offset in (None, torch.ones(4, 2))]
    with pytest.raises(ValueError, match="all have offsets or none"):
        the_extension().prepack_int4(parts, 32)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((2, 8), 8, dtype=torch.int8), "−8 to 7"),
        (torch.ones(2, 12, dtype=torch.int8), "multiple of 8"),
        (torch.ones(2, 8), "int8"),
    ],
)
def test_packing_refuses(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_int4(weight)


@needs_extension
@pytest.mark.parametrize(
    ("words", "scale", "group", "message"),
    [
        (WORDS, torch.ones(4, 4), 16, "multiple of 32"),
        (WORDS, torch.ones(4, 1), 96, "multiple of 32 that divides"),
        (WORDS, torch.ones(4, 1).double(), 64, "float32, bfloat16"),
        (WORDS, torch.ones(4, 1), 32, "scale_NG"),
        (WORDS.t().contiguous().t(), torch.ones(4, 1), 64, "contiguous"),
    ],
)
def test_panels_refuse(words: Tensor, scale: Tensor, group: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        the_extension().prepack_int4([(words, scale, None, None)], group)


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 33), torch.ones(2, 32, dtype=torch.int8)])
def test_layers_refuse(x: Tensor) -> None:
    with pytest.raises(ValueError, match="x_MK"):
        int4_linear(x, random_layer(5, 32, 32))
