from __future__ import annotations

import torch

from penjing.kernels.quantize_gradient import dequantize_gradient
from penjing.train.processes.compressed import Codec


def arrived(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([dequantize_gradient(row, rows.shape[1]) for row in codec.pack(rows)])


def test_what_rounding_loses_comes_later() -> None:
    rows = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    codec, steps = Codec(), 50
    total = sum(arrived(codec, rows) for _ in range(steps))
    step = rows.abs().max() / 127
    assert (arrived(Codec(), rows) - rows).abs().max() > step / 2  # one by itself is that wrong
    # All together lack only what the last has lost: one rounding. Without feedback it would be about √steps of them.
    assert (total - steps * rows).abs().max() <= 1.5 * step


def test_three_quarters_of_the_bytes_stay_here() -> None:
    codec = Codec()
    codec.pack(torch.randn(4, 8192))
    assert codec.sent / codec.plain <= 0.2505


def test_an_overflow_is_seen_and_not_remembered() -> None:
    codec = Codec()
    rows = torch.ones(1, 2048)
    rows[0, 3] = torch.inf
    assert not arrived(codec, rows).isfinite().all()
    assert torch.allclose(arrived(codec, torch.ones(1, 2048)), torch.ones(1, 2048), atol=0.02)
