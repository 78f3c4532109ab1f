"""The C++ extension, for tests that call it directly."""

from __future__ import annotations

import pytest

from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import CpuExtension

EXTENSION = extension()
needs_extension = pytest.mark.skipif(EXTENSION is None, reason="the C++ kernels are not built")


def the_extension() -> CpuExtension:
    assert EXTENSION is not None
    return EXTENSION
