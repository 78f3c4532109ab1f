"""Images with their channels last while a graph learns: the same numbers, whatever the graph does to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penjing.core.graph.network import Network, tensors_of
from penjing.train.families.graph import rebuilt
from penjing.train.numerics.layout import channels_last
from tests.compress.graphs import graph


class Flattened(nn.Module):
    """A network whose images become rows by a `view`, which refuses images that lie with their channels last."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.first, self.point = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 1, stride=stride)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Linear(4 * 8 * 8 // stride**2, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.point(torch.relu(self.first(images))))
        return self.last(x.view(x.shape[0], -1))


def network(model: nn.Module) -> Network:
    torch.manual_seed(0)
    return graph(model, torch.randn(2, 3, 8, 8))


def test_it_learns_the_same() -> None:
    net = network(Flattened())
    plain, last = rebuilt(net).train(), rebuilt(net).train()
    assert channels_last(last)
    x = torch.randn(4, 3, 8, 8)
    for model in (plain, last):
        model(x)[0].square().sum().backward()
    for name, parameter in plain.named_parameters():
        other = last.get_parameter(name)
        assert parameter.grad is not None
        assert other.grad is not None
        assert torch.allclose(parameter.grad, other.grad, rtol=1e-4, atol=1e-4), name
    assert tensors_of(last)["first.weight"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), Flattened(stride=2)])
def test_what_gains_nothing_or_is_not_safe_stays(model: nn.Module) -> None:
    if isinstance(model, Flattened):  # oneDNN may write past the end of the gradient of the layer of stride 2
        model.point.stride = (2, 2)
    made = rebuilt(network(model))
    before = {name: tensor.stride() for name, tensor in tensors_of(made).items()}
    assert not channels_last(made)
    assert before == {name: tensor.stride() for name, tensor in tensors_of(made).items()}
