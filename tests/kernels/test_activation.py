"""Activations without a gate, and soft caps, against float64; attention within caps against its formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penjing.kernels.activation import ACTIVATIONS, Activation, activate
from penjing.kernels.paged_attention import paged_attention
from penjing.kernels.scored_attention import scored_attention, soft_cap
from tests.kernels.paging import Cache, draw_sequence

pytestmark = pytest.mark.usefixtures("implementation")
CURVE = 0.7, 1.2
WIDE = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
    "xielu": lambda x: torch.where(
        x > 0, CURVE[0] * x * x + 0.5 * x, (torch.expm1(x.clamp(max=0)) - x) * CURVE[1] + 0.5 * x
    ),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_each_activation(kind: Activation) -> None:
    x = torch.cat((torch.linspace(-14, 14, 4003), torch.tensor([0.0, -200.0, 200.0, torch.inf, torch.nan])))
    found, expected = activate(x, kind, CURVE), WIDE[kind](x.double())
    assert found[-1].isnan()
    torch.testing.assert_close(found[:-1].double(), expected[:-1], rtol=5e-7, atol=5e-7)
    assert torch.equal(activate(x[1000:1007], kind, CURVE), found[1000:1007])  # wherever an element lies


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gradients_of_activations(kind: Activation) -> None:
    x = torch.linspace(-3, 3, 8, dtype=torch.float64, requires_grad=True)  # ReLU has no gradient at 0
    assert torch.autograd.gradcheck(lambda x: activate(x, kind, CURVE), (x,))


def test_soft_cap() -> None:
    x = torch.cat((torch.linspace(-90, 90, 1001), torch.tensor([1e6, -1e6])))
    torch.testing.assert_close(soft_cap(x, 30.0).double(), 30 * torch.tanh(x.double() / 30), rtol=1e-6, atol=4e-6)


def capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float, window: int | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """(T, H, D) in float64, by the formula."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    score = cap * torch.tanh(q @ k.mT / q.shape[-1] ** 0.5 / cap)
    place = torch.arange(q.shape[1])
    apart = place[:, None] - place
    hidden = (apart < 0) | (apart >= (window or len(place)))
    score = score.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        score = torch.cat((score, sinks.double()[:, None, None].expand(-1, len(place), 1)), -1)
    return (score.softmax(-1)[..., : len(place)] @ v).transpose(0, 1)


SINKS = torch.tensor([-3.0, 0.5, 2.0, 60.0])  # the last takes all but nothing of the sum


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 60])
def test_attention_within_caps(window: int | None, sinks: torch.Tensor | None) -> None:
    sequence = draw_sequence(300, 300, 4, 2, 24, seed=1)
    q = sequence.q * 3
    expected = capped(q, sequence.k, sequence.v, 1.5, window, sinks)
    q_BHTD, k_BKTD, v_BKTD = (x.transpose(0, 1)[None] for x in (q, sequence.k, sequence.v))
    found = scored_attention(q_BHTD, k_BKTD, v_BKTD, 1.5, window, sinks)[0].transpose(0, 1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for int8, bound in ((False, 1e-5), (True, 0.03)):
        cache = Cache([sequence], 16, seed=2, dtype=torch.int8 if int8 else torch.float32)
        lengths = torch.tensor([0, 300]).int(), torch.tensor([300]).int()
        given: dict[str, Any] = dict(zip(("k_scale", "v_scale"), cache.scales, strict=False))
        given |= {"cap": 1.5, "sinks_H": sinks}
        paged = paged_attention(q, cache.k, cache.v, *lengths, cache.table, 24**-0.5, window, **given)
        torch.testing.assert_close(paged.double(), expected, rtol=bound, atol=bound)
