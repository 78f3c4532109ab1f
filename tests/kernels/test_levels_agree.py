"""Instruction sets are interchangeable: whatever the layer and the batch, a row's bits are the same on each of them."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from penjing.kernels.activation import ACTIVATIONS, Activation, activate_torch
from penjing.kernels.cpu.functions import ISAS, CpuExtension
from penjing.kernels.cpu.packing import Panels
from penjing.kernels.int4_linear import pack_int4
from tests.kernels.cpu import needs_extension, the_extension
from tests.kernels.test_decoder_step import STYLES, draw_ids, inputs, make_step, new_pool
from tests.kernels.test_stepped import random_steps

CURVE = 0.7, 1.2  # of xielu
pytestmark = needs_extension

# Around what tiles hold: 16 rows, 64 inputs, panels of 16 to 64 outputs.
ROWS = st.one_of(st.integers(1, 50), st.sampled_from([63, 64, 65, 97]))
OUTPUTS = st.integers(1, 150)


@pytest.fixture
def levels() -> Iterator[list[str]]:
    """The instruction sets that run here."""
    kernels, before = the_extension(), the_extension().isa
    found = []
    for name in ISAS:
        try:
            kernels.select_isa(name)
        except ValueError:
            continue
        found.append(name)
    yield found
    kernels.select_isa(before)


def same_on_each(kernels: CpuExtension, levels: list[str], x: Tensor, panels: Panels, cut: int) -> None:
    """One result for all levels, for the whole batch and for it in two pieces; gates are close, not equal."""
    linear = kernels.int4_linear if panels.linear.group else kernels.int8_linear
    expected = None
    for level in levels:
        kernels.select_isa(level)
        whole = linear(x, panels)
        assert torch.equal(torch.cat([linear(x[:cut], panels), linear(x[cut:], panels)]), whole)
        if expected is None:
            expected = whole
        elif panels.linear.swiglu:
            torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6)
        else:
            assert torch.equal(whole, expected), level


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    outputs=OUTPUTS,
    inputs=st.integers(1, 400) | st.integers(500, 800),  # with zero points blocks of 256 inputs
    swiglu=st.booleans(),
    above=st.booleans(),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_int8(
    levels: list[str], rows: int, outputs: int, inputs: int, swiglu: bool, above: bool, seed: int, data: st.DataObject
) -> None:
    kernels, g = the_extension(), torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, ((1 + swiglu) * outputs, inputs), dtype=torch.int8, generator=g)
    scale, bias = torch.rand(len(weight), generator=g) * 1e-3, torch.randn(len(weight), generator=g)
    panels = kernels.prepack_int8(weight, scale, bias, swiglu=swiglu, zero_points=above)
    same_on_each(kernels, levels, torch.randn(rows, inputs, generator=g), panels, data.draw(st.integers(0, rows)))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    outputs=OUTPUTS,
    group=st.sampled_from([32, 64, 96, 128, 256]),
    groups=st.integers(1, 6),
    swiglu=st.booleans(),
    above=st.booleans(),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_int8_in_steps(
    levels: list[str],
    rows: int,
    outputs: int,
    group: int,
    groups: int,
    swiglu: bool,
    above: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    kernels, g = the_extension(), torch.Generator().manual_seed(seed)
    weight = random_steps((1 + swiglu) * outputs, group * groups, group, seed)
    scale = torch.rand(weight.shape[0], generator=g) * 1e-3
    part = (weight.packed_NK8, scale, weight.step_NG2, torch.randn(weight.shape[0], generator=g))
    above = above and 256 % group == 0
    panels = kernels.prepack_stepped([part], group, swiglu=swiglu, zero_points=above)
    same_on_each(
        kernels, levels, torch.randn(rows, weight.shape[1], generator=g), panels, data.draw(st.integers(0, rows))
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=ROWS,
    outputs=OUTPUTS,
    group=st.sampled_from([32, 64, 96, 128]),
    groups=st.integers(1, 6),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    offsets=st.booleans(),
    half=st.booleans(),
    seed=st.integers(0, 999),
    data=st.data(),
)
def test_int4(
    levels: list[str],
    rows: int,
    outputs: int,
    group: int,
    groups: int,
    dtype: torch.dtype,
    offsets: bool,
    half: bool,
    seed: int,
    data: st.DataObject,
) -> None:
    kernels, g = the_extension(), torch.Generator().manual_seed(seed)
    weight = torch.randint(-8, 8, (outputs, group * groups), dtype=torch.int8, generator=g)
    scale = (torch.randn(outputs, groups, generator=g) * 0.01).to(dtype)
    offset = (torch.randn(outputs, groups, generator=g) * 0.05).to(dtype) if offsets else None
    parts = [(pack_int4(weight), scale, offset, torch.randn(outputs, generator=g))]
    panels = kernels.prepack_int4(parts, group, half_inputs=half)
    x = torch.randn(rows, group * groups, generator=g)
    same_on_each(kernels, levels, x, panels, data.draw(st.integers(0, rows)))


def test_inputs_of_many_tiles(levels: list[str]) -> None:
    g = torch.Generator().manual_seed(1)
    kernels, weight = the_extension(), torch.randint(-8, 8, (40, 5184), dtype=torch.int8, generator=g)
    scale = torch.rand(40, 5184 // 32, generator=g).half()
    panels = kernels.prepack_int4([(pack_int4(weight), scale, -7 * scale, None)], 32)
    same_on_each(kernels, levels, torch.randn(75, 5184, generator=g), panels, 9)
    whole = kernels.prepack_int4([(pack_int4(weight), scale[:, :1].clone(), None, None)], 5184)
    same_on_each(kernels, levels, torch.randn(75, 5184, generator=g), whole, 9)
    panels = kernels.prepack_int8(weight, torch.rand(40, generator=g))
    same_on_each(kernels, levels, torch.randn(75, 5184, generator=g), panels, 9)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(levels: list[str], kind: Activation) -> None:
    special = torch.tensor([0.0, -200.0, 200.0, -torch.inf, torch.nan])
    x = torch.cat((torch.linspace(-14, 14, 1003), special))
    for level in levels:
        the_extension().select_isa(level)
        found = the_extension().activate(x, ACTIVATIONS.index(kind), CURVE)
        assert found[-1].isnan(), level
        wide = activate_torch(x.double(), kind, CURVE)
        torch.testing.assert_close(found[:-2], wide[:-2].float(), rtol=5e-7, atol=5e-7)


def test_soft_caps(levels: list[str]) -> None:
    x = torch.cat((torch.linspace(-90, 90, 1001), torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan])))
    for level in levels:
        the_extension().select_isa(level)
        found = the_extension().soft_cap(x, 30.0)
        torch.testing.assert_close(
            found, (30 * torch.tanh(x.double() / 30)).float(), rtol=1e-6, atol=4e-6, equal_nan=True
        )


@pytest.mark.parametrize(("int8", "bound"), [(True, 0.05), (False, 1e-5)], ids=["int8", "float"])
@pytest.mark.parametrize("style", STYLES)
def test_whole_steps(levels: list[str], style: str, int8: bool, bound: float) -> None:
    """Rounded activations may fall to the other side of a half, so that of INT8 steps are only close."""
    arguments = inputs([(draw_ids(60), 0, list(range(15)))], new_pool())
    found = []
    for level in levels:
        the_extension().select_isa(level)
        found.append(make_step(int8, style=style).step(**arguments).clone())
    for level, logits in zip(levels, found, strict=True):
        assert (logits - found[0]).abs().max() < bound * found[0].std(), level


# Refuses what asks Linux for room for tiles (arch_prctl with ARCH_REQ_XCOMP_PERM), as a system without it does.
REFUSE = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
def step(code, value, yes=0, no=0):
    return struct.pack("HBBI", code, yes, no, value)
LOAD, EQUAL, RETURN, ALLOW = 0x20, 0x15, 0x06, 0x7FFF0000
filter = b"".join((
    step(LOAD, 0), step(EQUAL, 158, 0, 3),      # the call's number: arch_prctl
    step(LOAD, 16), step(EQUAL, 0x1023, 0, 1),  # its first argument
    step(RETURN, 0x00050000 | 1),               # EPERM
    step(RETURN, ALLOW),
))
buffer = ctypes.create_string_buffer(filter)
program = struct.pack("HxxxxxxQ", len(filter) // 8, ctypes.addressof(buffer))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program):
    raise SystemExit(77)
"""
USE = """
import torch
from penjing.kernels.cpu import extension
kernels = extension()
panels = kernels.prepack_int8(torch.ones(64, 128, dtype=torch.int8), torch.ones(64))
assert kernels.int8_linear(torch.ones(40, 128), panels).eq(128).all()
print(kernels.isa)
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)


def test_a_system_that_refuses_tiles_is_served_without_them(levels: list[str]) -> None:
    if "amx" not in levels:
        pytest.skip("this processor or its system does not run 'amx'")
    code = REFUSE + USE + 'kernels.select_isa("amx")'
    done = run(code, PENJING_CPU_ISA="")
    if done.returncode == 77:
        pytest.skip("this system installs no filters of system calls")
    assert done.stdout.split() == [levels[1]], done.stderr
    assert "its system does not run 'amx'; choose auto" in done.stderr
