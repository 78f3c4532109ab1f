"""The C++ extension, for tests that call it directly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penjing.kernels.cpu import extension
from penjing.kernels.cpu.functions import CpuExtension

EXTENSION = extension()
needs_extension = pytest.mark.skipif(EXTENSION is None, reason="the C++ kernels are not built")


def the_extension() -> CpuExtension:
    assert EXTENSION is not None
    return EXTENSION


def by_token(pages: Tensor) -> Tensor:
    """Turned pages (..., block_size, head_dim) in the order of other pages."""
    in_word = 4 if pages.dtype == torch.int8 else 1
    head_dim = pages.shape[-1]
    words = pages.reshape(*pages.shape[:-2], -1, head_dim // in_word, 16, in_word)
    return words.transpose(-3, -2).reshape(pages.shape).contiguous()
