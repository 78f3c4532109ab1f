"""The Fisher score against measured divergence, and the choice of layers against every other choice."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.compress.graph.bits import fisher_scores, graph_bits, within_bits
from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.place import apply_quantization, products
from penjing.compress.graph.prepare import prepared
from penjing.compress.quantize.bits import keep_floating
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.rounding.modes import set_mode
from penjing.core.errors import ConfigError
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from penjing.core.models.resnet import ResNet
from tests.compress.graph.networks import Block, randomised
from tests.compress.quantize.folders import image_data, trained_resnet
from tests.compress.quantize.networks import network_of


class Shares(nn.Module):
    """The classifier with shares of classes as outputs, as many files have them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = trained_resnet()

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).softmax(1)


def calibrated(network: Network, batches: Iterable[tuple[Tensor, ...]]) -> Network:
    made = apply_quantization(network, GraphSettings())
    calibrate_graph(made, batches)
    return made


@torch.no_grad()
def measured_alone(network: Network, batches: list[tuple[Tensor, ...]], distance: str) -> dict[str, float]:
    """What each layer changes when it alone is rounded: nats, or half the squared change, a sample."""
    set_mode(network.module, "off")
    wanted = [network(*inputs)[0] for inputs in batches]
    found = {}
    for product in products(network):
        quantizers = [each for each in (product.before, product.rounding) if each is not None]
        total = 0.0
        for each in quantizers:
            each.mode = "on"
        for inputs, before in zip(batches, wanted, strict=True):
            after = network(*inputs)[0]
            if distance == "nats":
                logs = (before.log_softmax(1), after.log_softmax(1))
                logs = (before.log(), after.log()) if bool((before >= 0).all()) else logs
                total += float(F.kl_div(logs[1], logs[0], log_target=True, reduction="sum"))
            else:
                total += float((after - before).double().square().sum()) / 2
        for each in quantizers:
            each.mode = "off"
        found[product.name] = total / sum(len(inputs[0]) for inputs in batches)
    return found


def _tokens() -> tuple[Network, list[tuple[Tensor, ...]], str]:
    x = torch.randn(64, 9, 32, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    return from_torch(randomised(Block()), (x,)), [(part,) for part in x.split(16)], "squares"


def _classes(shares: bool) -> tuple[Network, list[tuple[Tensor, ...]], str]:
    batches = list(image_data(256).inputs())
    network = from_torch(Shares(), batches[0], meaning="classes") if shares else network_of(trained_resnet())
    return network, batches, "nats"


@pytest.mark.parametrize("case", ["logits", "shares", "tokens"])
def test_scores_estimate_what_each_layer_alone_changes(case: str) -> None:
    network, batches, distance = _tokens() if case == "tokens" else _classes(case == "shares")
    network = calibrated(network, batches)
    scores = fisher_scores(network, batches)
    measured = measured_alone(network, batches, distance)
    assert scores.keys() == measured.keys()
    ratios = [scores[name] / measured[name] for name in scores]
    assert 0.5 < np.median(ratios) < 2.0, ratios
    ours, theirs = (np.argsort(np.argsort(list(each.values()))) for each in (scores, measured))
    assert np.corrcoef(ours, theirs)[0, 1] > 0.75
    assert fisher_scores(network, batches) == scores


def test_the_budget_is_kept_and_the_sum_of_scores_is_the_largest() -> None:
    values = {"a": 5.0, "b": 4.0, "c": 3.0, "d": 0.5, "dead": 0.0}
    sizes = {"a": 60, "b": 50, "c": 49, "d": 1, "dead": 1}
    for budget in (0.5, 1, 51, 60, 99, 100, 111, 1000):
        chosen = keep_floating(values, sizes, budget)
        sets = [names for count in range(5) for names in combinations("abcd", count)]
        allowed = [names for names in sets if sum(sizes[name] for name in names) <= budget]
        best = max(sum(values[name] for name in names) for names in allowed)
        assert sum(sizes[name] for name in chosen) <= budget
        assert sum(values[name] for name in chosen) == best


def outlier() -> ResNet:
    """Weights that read a dead channel are huge, and leave the other weights of their layer few levels."""
    model = trained_resnet()
    block = model.blocks[1]
    with torch.no_grad():
        block.layers[0].norm.weight[0], block.layers[0].norm.bias[0] = 0.0, -1.0  # type: ignore[union-attr, index]
        block.layers[1].conv.weight[:, 0] = 20.0  # type: ignore[union-attr, index]
    return model


def test_effective_bits_keep_the_layers_that_lose_most() -> None:
    floating, data = prepared(network_of(outlier())), image_data(256)
    settings = within_bits(floating, GraphSettings(effective_bits=16), data.inputs)
    assert settings.effective_bits is None
    assert "blocks.1.layers.1" in settings.keep
    errors, bits = [], []
    for kept in (GraphSettings(), settings):
        network = apply_quantization(floating, kept)
        calibrate_graph(network, data.inputs())
        bits.append(graph_bits(network))
        (images,) = next(data.inputs())
        with torch.no_grad():
            errors.append(float((network(images)[0] - floating(images)[0]).norm()))
    assert bits[0] == 8
    assert 8 < bits[1] <= 16
    assert errors[1] < 0.3 * errors[0]


def test_a_budget_that_cannot_be_kept_is_refused() -> None:
    settings = GraphSettings(target="tensorrt", effective_bits=8.1)
    with pytest.raises(ConfigError, match=r"effective_bits=8\.1 cannot be kept: target tensorrt and keep leave stem, "):
        within_bits(prepared(network_of(trained_resnet())), settings, image_data().inputs)
