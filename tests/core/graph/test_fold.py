"""Batch norms become part of the layer before them, whatever its weight is called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penjing.core.graph.fold import fold_batch_norms
from penjing.core.graph.network import propagate, tensors_of
from penjing.core.graph.trace import from_torch


class Named(nn.Module):
    """(batch, 3, 8, 8) → (batch, 5, 8, 8), of weights that are called as ONNX files call them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1_weights = nn.Parameter(torch.randn(4, 3, 3, 3))
        self.weight = nn.Parameter(torch.randn(5, 4, 1, 1))
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(5)
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(nn.functional.conv2d(x, self.conv1_weights, padding=1))
        return self.second(nn.functional.conv2d(y, self.weight))


@torch.no_grad()
def test_folded_weights_keep_their_names() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 8, 8)
    network = from_torch(Named().eval(), (images,))
    wanted = network(images)[0]
    propagate(network)
    assert fold_batch_norms(network) == 2
    assert set(tensors_of(network.module)) == {"conv1_weights", "conv1_weights_bias", "weight", "bias"}
    torch.testing.assert_close(network(images)[0], wanted, rtol=1e-4, atol=1e-5)
