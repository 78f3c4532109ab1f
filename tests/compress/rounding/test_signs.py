"""Signs of channels: no other sign of one channel is better, and what was given stays."""

from __future__ import annotations

import pytest
import torch

from penjing.compress.rounding.signs import aligned_signs


@pytest.mark.parametrize("seed", range(5))
def test_no_channel_alone_would_do_better_with_the_other_sign(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 16, generator=generator) * torch.randn(24, 16, generator=generator).exp()
    before, tokens = x.clone(), torch.rand(24, generator=generator)

    def squares(signs: torch.Tensor) -> float:
        signed = x * signs
        return float(tokens @ (signed.amax(1).clamp(min=0) - signed.amin(1).clamp(max=0)).square())

    found = aligned_signs(x, tokens)
    assert x.equal(before)
    assert squares(found) < squares(torch.ones(16))
    for channel in range(16):
        other = found.clone()
        other[channel] *= -1
        assert squares(other) > squares(found) * (1 - 2e-5)
