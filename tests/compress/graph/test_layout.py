"""Weights that are rounded first lie with their channels last too."""

from __future__ import annotations

import torch
from torch import nn

from penjing.compress.graph.place import place_quantizers
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.task import FrozenGraph
from penjing.compress.quantizers.graph import GraphQuantize
from penjing.train.numerics.layout import channels_last
from tests.compress.graphs import graph


def test_convolutions_of_a_network_that_rounds() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    placed = place_quantizers(prepared(graph(layers, torch.randn(2, 3, 12, 12))), GraphQuantize()).module
    model = FrozenGraph(placed, placed.graph)
    assert channels_last(model)
    assert model.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert model(torch.randn(2, 3, 12, 12))[0].is_contiguous(memory_format=torch.channels_last)
