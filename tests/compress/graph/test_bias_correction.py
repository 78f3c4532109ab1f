"""Bias correction removes the mean error of every layer, also where the calibration data come in batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penjing.compress.graph.calibrate import calibrate_graph, correct_graph_biases
from penjing.compress.graph.place import apply_quantization
from penjing.compress.graph.prepare import prepared
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from tests.compress.quantize.networks import basic, bottleneck, images, network_of, quantized, random_resnet


@torch.no_grad()
def shifts(network: Network, floating: Network, x: Tensor) -> float:
    """Mean error of the logits, relative to how much they vary between images."""
    wanted = floating(x)[0]
    return float((network(x)[0].mean(0) - wanted.mean(0)).norm() / wanted.std(0).norm())


def test_means_are_those_of_the_floating_network() -> None:
    for config in (basic(), bottleneck()):
        model = random_resnet(config)
        floating = prepared(network_of(model))
        x, others = images(config, 64), images(config, 64, seed=5)
        for batches in ([(x,)], [(part,) for part in x.split(16)]):
            network = quantized(model, x, target="onnxruntime-avx2")
            seen, unseen = shifts(network, floating, x), shifts(network, floating, others)
            correct_graph_biases(network, floating, batches)
            assert seen > 0.01  # or there is nothing to mend
            assert shifts(network, floating, x) < 0.35 * seen
            assert shifts(network, floating, others) < 0.6 * unseen


def test_only_biases_change() -> None:
    model = random_resnet(basic())
    x = images(basic(), 32)
    network = quantized(model, x, target="onnxruntime-avx2")
    before = {name: value.clone() for name, value in network.module.state_dict().items()}
    correct_graph_biases(network, prepared(network_of(model)), [(x,)])
    after = network.module.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith(".bias") for name in changed)


class SharedHead(nn.Module):
    """(batch, 32) → two outputs (batch, 16) of one head, which sees what its two inputs shift in other ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.head(self.hidden(each(x).relu()).relu()) for each in (self.first, self.second))


@torch.no_grad()
def test_a_bias_that_several_layers_read_is_corrected_by_their_mean() -> None:
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    model = SharedHead().eval()
    floating = prepared(from_torch(model, (x[:2],)))
    network = apply_quantization(from_torch(model, (x[:2],)), GraphSettings(correct_bias=True))
    calibrate_graph(network, [(x,)])

    def shifted() -> Tensor:
        """(2, 16) mean errors of both outputs."""
        return torch.stack([(a - b).mean(0) for a, b in zip(network(x), floating(x), strict=True)])

    before = shifted()
    correct_graph_biases(network, floating, [(x,)])
    assert shifted().mean(0).norm() < 0.05 * before.mean(0).norm()
    for error, apart in zip(shifted(), before - before.mean(0), strict=True):  # what no shared bias can mend
        assert (error - apart).norm() < 0.5 * apart.norm()
