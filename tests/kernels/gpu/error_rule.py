"""The rule of FlashAttention's own tests: at most twice the error that torch makes in the same dtype."""

import torch
from torch import Tensor


def assert_as_close_as_torch(name: str, found: Tensor, same_dtype: Tensor, exact: Tensor, atol: float = 2e-6) -> None:
    """`exact` is a 64-bit reference, `same_dtype` what torch computes in the dtype of `found`."""
    assert found.dtype == same_dtype.dtype
    assert found.shape == exact.shape
    assert torch.isfinite(found).all(), f"{name} is not finite"
    if exact.numel():
        error, allowed = ((x.double() - exact).abs().max().item() for x in (found, same_dtype))
        assert error <= 2 * allowed + atol, f"{name}: error {error:.3g}, torch's {allowed:.3g}"
