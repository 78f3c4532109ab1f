"""Losses without labels: what their gradients' mean squares are, beside the matrices that they estimate."""

from __future__ import annotations

import torch
from torch import nn

from penjing.compress.samples.graph import drawn_loss
from penjing.core.graph.config import GraphConfig
from tests.compress.graphs import graph


def mean_squares(model: nn.Linear, x: torch.Tensor, config: GraphConfig, draws: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros_like(model.weight)
    for _ in range(draws):
        (found,) = torch.autograd.grad(drawn_loss((model(x),), config, generator), model.weight)
        total += found.square()
    return total / draws


def test_classes_give_fishers_information() -> None:
    x, model = torch.randn(1, 3, generator=torch.Generator().manual_seed(1)), nn.Linear(3, 4)
    config = graph(model, x.expand(2, 3).clone(), meaning="classes").config
    shares = model(x).detach().softmax(1)[0]
    # d log p_k / d W = (onehot_k - p) xᵀ, squared and averaged over p
    wanted = (shares * (1 - shares))[:, None] * x[0].square()
    assert torch.allclose(mean_squares(model, x, config, 3000), wanted, rtol=0.15, atol=1e-4)


def test_other_outputs_give_the_square_of_their_gradients() -> None:
    x, model = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), nn.Linear(3, 2)
    config = graph(model, x).config
    wanted = x.square().sum(0).expand(2, 3) / 10  # ten numbers; signs are independent
    assert torch.allclose(mean_squares(model, x, config, 3000), wanted, rtol=0.15)
