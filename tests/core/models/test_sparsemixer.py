"""How Phi with experts chooses two and weighs them, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from penjing.core.config import parse_config
from penjing.core.errors import ConfigError
from penjing.core.layers.settings import MoEConfig
from penjing.core.models.moe import MoE

MIXED: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "scoring_func": "sparsemixer",
    "norm_topk_prob": False,
}


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.2, 1.5])
@pytest.mark.parametrize("shift", [-2.0, 0.0, 2.0])
def test_weights_and_their_gradients(noise: float, shift: float) -> None:
    moe = MoE(7, MoEConfig(**MIXED, router_jitter_noise=noise))
    with torch.no_grad():
        moe.gate.weight.copy_(torch.eye(7))
    logits = torch.randn(200, 7, generator=torch.Generator().manual_seed(0)) + shift
    pushed = torch.randn(200, 2, generator=torch.Generator().manual_seed(1))
    results: list[tuple[torch.Tensor, ...]] = []
    for route in (moe.route, lambda x: sparsemixer(x, noise, training=False)):
        x = logits.clone().requires_grad_()
        weights, experts = route(x)
        (weights * pushed).sum().backward()
        assert x.grad is not None
        results.append((weights.detach(), experts, x.grad))
    (found, chosen, gradient), (expected, wanted, of_theirs) = results
    assert torch.equal(chosen, wanted)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, of_theirs)
    assert noise == 0.0 or float(found.min()) < 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 3}, "has num_experts_per_tok=2"),
        ({"norm_topk_prob": True}, "norm_topk_prob=false"),
        ({"router_bias": True}, "no groups and no router_bias"),
        ({"router_bias_of": "logits"}, "router_bias_of='logits' needs router_bias"),
        ({"scoring_func": "softmax", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is of scoring_func"),
    ],
)
def test_what_does_not_go_with_it(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(MoEConfig, MIXED | changes, "moe")
