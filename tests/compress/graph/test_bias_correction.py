"""Bias correction removes the mean error of every layer, also where the calibration data come in batches."""

from __future__ import annotations

import torch
from torch import Tensor

from penjing.compress.graph.calibrate import correct_graph_biases
from penjing.compress.graph.prepare import prepared
from penjing.core.graph.network import Network
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
