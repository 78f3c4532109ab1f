"""Run a kernel test on each implementation behind the public functions."""

from collections.abc import Iterator

import pytest

from penjing.kernels.cpu import extension
from penjing.kernels.dispatch import force_torch


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
