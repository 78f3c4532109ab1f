"""Rows in the order of their experts, on any device: no rows at all, and experts without any."""

from __future__ import annotations

import pytest
import torch

from penjing.kernels.moe import one_by_one


@pytest.mark.parametrize("gradients", [False, True])
def test_no_rows_are_no_rows_and_gradients_of_zero(gradients: bool) -> None:
    weights = [torch.ones(3, 3, requires_grad=True) for _ in range(2)]
    with torch.set_grad_enabled(gradients):
        y_RE = one_by_one(torch.empty(0, 3), [0, 0], lambda index, part: part @ weights[index])
    assert y_RE.shape == (0, 3)
    if gradients:
        y_RE.sum().backward()
        assert all(weight.grad is not None and not weight.grad.any() for weight in weights)
