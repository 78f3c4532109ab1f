"""INT8 weights that are stored in 4 bits: their bytes beside the definition, and the layer beside that of the bytes."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from penjing.core.runtime.quantized import Int8Linear, moved
from penjing.kernels.dispatch import force_torch
from penjing.kernels.int4_linear import pack_int4, prepack_int4
from penjing.kernels.int8_linear import int8_linear, prepack_int8
from penjing.kernels.step_layers import pack_together
from penjing.kernels.stepped import SteppedInt8, stepped_int8
from tests.kernels.cpu import needs_extension, the_extension

# (outputs, inputs, group): panels of 16 to 64 columns, groups that divide what is expanded at a time and others.
SHAPES = [(16, 32, 32), (70, 64, 64), (130, 576, 32), (33, 288, 96), (100, 480, 160), (48, 768, 256)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_steps(outputs: int, inputs: int, group: int, seed: int = 0) -> SteppedInt8:
    """A weight whose groups reach both ends of INT8."""
    g, shape = generator(seed), (outputs, inputs // group)
    step = torch.randint(1, 17, shape, generator=g)
    offset = -127 + (torch.rand(shape, generator=g) * (255 - 15 * step)).long()
    step[0, 0], offset[0, 0] = 16, -127
    number = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, generator=g)
    return stepped_int8(pack_int4(number), step.to(torch.int8), offset.to(torch.int8))


def test_bytes_are_offset_and_steps() -> None:
    weight = random_steps(5, 96, 32)
    words = weight.packed_NK8.numpy().view(np.uint32)
    for row in range(5):
        for column in range(96):
            number = int(words[row, column // 8] >> 4 * (column % 8)) & 15
            step, offset = weight.step_NG2[row, column // 32].tolist()
            assert int(weight.expand()[row, column]) == offset + step * number
    assert weight.group == 32
    assert torch.equal(weight.rows(slice(1, 4)).expand(), weight.expand()[1:4])


@needs_extension
@pytest.mark.parametrize("above", [False, True], ids=["by token", "zero points"])
@pytest.mark.parametrize(("outputs", "inputs", "group"), SHAPES)
def test_a_layer_equals_that_of_its_bytes(outputs: int, inputs: int, group: int, above: bool) -> None:
    if above and 256 % group:
        pytest.skip("with zero points groups divide 256 inputs")
    weight = random_steps(outputs, inputs, group)
    scale, bias = torch.rand(outputs, generator=generator(1)) * 1e-3, torch.randn(outputs, generator=generator(2))
    stepped, plain = (prepack_int8(each, scale, bias, above) for each in (weight, weight.expand()))
    for rows in (1, 2, 6, 7, 8, 16, 97, 200):
        x = torch.randn(rows, inputs, generator=generator(rows))
        found = int8_linear(x, stepped)
        assert torch.equal(found, int8_linear(x, plain)), rows
        with force_torch():
            assert torch.equal(found, int8_linear(x, stepped)), rows


@needs_extension
def test_groups_that_end_amid_a_block_of_zero_points_are_refused() -> None:
    weight = random_steps(8, 192, 96)
    with pytest.raises(ValueError, match=r"groups of 96 inputs: with zero points .* divide 256"):
        prepack_int8(weight, torch.ones(8), zero_points=True)
    part = (weight.packed_NK8, torch.ones(8), weight.step_NG2, None)
    with pytest.raises(ValueError, match="group=96: with zero points one that divides 256"):
        the_extension().prepack_stepped([part], 96, zero_points=True)


@needs_extension
def test_layers_of_one_input_are_packed_as_one() -> None:
    kernels, weights = the_extension(), [random_steps(40, 64, 32, seed=seed) for seed in (0, 1)]
    scale, x = torch.rand(80, generator=generator(1)) * 1e-3, torch.randn(9, 64, generator=generator(3))
    parts = [(each.packed_NK8, scale[40 * i : 40 * i + 40], each.step_NG2, None) for i, each in enumerate(weights)]
    joined = torch.cat([each.expand() for each in weights])
    for swiglu, above in itertools.product((False, True), repeat=2):
        found = kernels.int8_linear(x, kernels.prepack_stepped(parts, 32, swiglu=swiglu, zero_points=above))
        plain = kernels.prepack_int8(joined, scale, swiglu=swiglu, zero_points=above)
        assert torch.equal(found, kernels.int8_linear(x, plain))
    half = kernels.packed_stepped_bytes(1024, 1024, 64) / kernels.packed_bytes(1024, 1024)
    assert half < 0.54


def test_a_weight_that_goes_to_a_device_becomes_bytes() -> None:
    weight = random_steps(24, 64, 32)
    layer = Int8Linear(weight, torch.rand(24, 1))
    assert layer.packed.stored is weight
    assert layer.to(torch.float64).packed.stored is weight
    away = moved(layer.packed, lambda tensor: tensor.to("meta"))
    assert isinstance(away.stored, Tensor)
    assert (away.stored.device.type, away.stored.dtype, away.stored.shape) == ("meta", torch.int8, (24, 64))


WORDS = pack_int4(torch.ones(4, 64, dtype=torch.int8))
STEP, OFFSET = torch.full((4, 2), 16, dtype=torch.int8), torch.full((4, 2), -127, dtype=torch.int8)


def changed(tensor: Tensor, value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[3, 1] = value
    return tensor


@pytest.mark.parametrize(
    ("weight", "step", "offset", "message"),
    [
        (WORDS, changed(STEP, 0), OFFSET, "from 0 to 16; steps are from 1 to 16"),
        (WORDS, changed(STEP, 17), OFFSET, "from 16 to 17; steps are from 1 to 16"),
        (WORDS, changed(STEP, -3), OFFSET, "from -3 to 16"),
        (WORDS, STEP, changed(OFFSET, -128), "offset_NG holds -128"),
        (WORDS, STEP, changed(OFFSET, -112), "15 steps reach 128, beyond the 127"),
        (WORDS, STEP.float(), OFFSET, "int8 .4, groups. is needed"),
        (WORDS, STEP[:3], OFFSET, "int8 .4, groups. is needed"),
        (WORDS, STEP, OFFSET[:, :1], "int8 .4, 2. is needed"),
        (WORDS, STEP, OFFSET.int(), "offset_NG is .*int32"),
        (WORDS.float(), STEP, OFFSET, "int32 .N, K / 8. is needed"),
        (WORDS[:, :4], STEP, OFFSET, "32 inputs in 2 groups"),
        (torch.zeros(4, 64, dtype=torch.int32), STEP[:, :1], OFFSET[:, :1], "512 inputs in 1 groups: .* at most 256"),
        (WORDS, STEP.to("meta"), OFFSET, "step_NG is on meta"),
    ],
)
def test_what_leaves_int8_is_refused(weight: Tensor, step: Tensor, offset: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stepped_int8(weight, step, offset)


@needs_extension
@pytest.mark.parametrize("kind", ["INT4", "in steps", "with zero points"])
def test_layers_that_end_amid_a_cache_line_lie_one_behind_the_other(kind: str) -> None:
    """80 outputs are five times 16, and their inputs three groups."""
    scales, x = torch.rand(80, 3, generator=generator(1)).half(), torch.randn(3, 96, generator=generator(2))
    weights, above = [random_steps(80, 96, 32, seed) for seed in (0, 1)], kind == "with zero points"
    layers = [
        prepack_int4(each.packed_NK8, scales) if kind == "INT4" else prepack_int8(each, torch.ones(80), None, above)
        for each in weights
    ]
    for layer, panels in zip(layers, pack_together(the_extension(), layers), strict=True):
        assert torch.equal(the_extension().int8_linear(x, panels), the_extension().int8_linear(x, layer.panels))


@needs_extension
def test_what_cannot_be_packed_is_refused() -> None:
    kernels, weight = the_extension(), random_steps(8, 512, 32)
    part = (weight.packed_NK8, torch.ones(8), weight.step_NG2, None)
    for group in (16, 48, 512):
        with pytest.raises(ValueError, match=f"group={group}: a multiple of 32 up to 256"):
            kernels.prepack_stepped([part], group)
    with pytest.raises(ValueError, match="step_NG2"):
        kernels.prepack_stepped([part], 64)
    with pytest.raises(ValueError, match="scale_N"):
        kernels.prepack_stepped([(part[0], torch.ones(7), part[2], None)], 32)
