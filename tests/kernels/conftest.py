"""Run a kernel test on each implementation behind the public functions."""

from collections.abc import Iterator

import pytest

from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import ISAS, CpuExtension
from penjing.kernels.dispatch import force_torch
from tests.kernels.cpu import the_extension


@pytest.fixture(params=["torch", "cpp"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """ "torch" or "cpp"; the second is skipped, by name, where the extension is not built."""
    if request.param == "torch":
        with force_torch():
            yield request.param
    elif extension() is None:
        pytest.skip("the C++ extension is not built")
    else:
        yield request.param


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[CpuExtension]:
    """The extension on each instruction set in turn."""
    kernels, before = the_extension(), the_extension().isa
    try:
        kernels.select_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield kernels
    kernels.select_isa(before)


@pytest.fixture(params=["torch", *ISAS])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """torch, or the C++ extension on one instruction set."""
    if request.param == "torch":
        with force_torch():
            yield request.param
        return
    if extension() is None:
        pytest.skip("the C++ extension is not built")
    kernels, before = the_extension(), the_extension().isa
    try:
        kernels.select_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    kernels.select_isa(before)


@pytest.fixture
def threads() -> Iterator[CpuExtension]:
    """The extension; its number of threads is restored afterwards."""
    kernels, before = the_extension(), the_extension().num_threads
    yield kernels
    kernels.set_num_threads(before)
