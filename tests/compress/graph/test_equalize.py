"""Equalisation changes no answer of the floating network, and brings back what badly scaled channels cost in INT8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.equalize import Link, equalize, links
from penjing.compress.graph.place import apply_quantization
from penjing.compress.graph.prepare import prepared
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, tensor_at
from penjing.core.graph.trace import from_torch
from penjing.core.models.resnet import ConvNorm
from penjing.core.models.resnet_config import ResNetConfig
from tests.compress.quantize.networks import basic, bottleneck, images, network_of, random_resnet


@torch.no_grad()
def badly_scaled(config: ResNetConfig, seed: int = 3) -> Network:
    """`random_resnet` with channels up to 2^6 wider than others, which the layers that read them undo."""
    network = prepared(network_of(random_resnet(config, seed)))
    generator = torch.Generator().manual_seed(seed)
    for link in links(network):
        width = link.writers[0].meta["val"].shape[1]
        factor = torch.randint(-6, 7, (width,), generator=generator).float().exp2()
        for name in (str(node.target) for writer in link.writers for node in writer.args[1:3]):  # type: ignore[union-attr]
            value = tensor_at(network.module, name)
            value.mul_(factor.view(-1, *[1] * (value.dim() - 1)))
        for reader in link.readers:
            weight = tensor_at(network.module, str(reader.args[1].target))  # type: ignore[union-attr]
            outputs, inputs = weight.shape[:2]
            groups = width // inputs
            for group in range(groups):
                rows = slice(group * outputs // groups, (group + 1) * outputs // groups)
                columns = factor[group * inputs : (group + 1) * inputs]
                weight[rows] /= columns.view(1, -1, *[1] * (weight.dim() - 2))
    return network


@torch.no_grad()
def int8_error(network: Network, x: Tensor) -> float:
    """Of the first output, relative."""
    expected = network(x)[0]
    quantized = apply_quantization(network, GraphSettings())
    calibrate_graph(quantized, [(x,)])
    return float((quantized(x)[0] - expected).norm() / expected.norm())


@torch.no_grad()
@pytest.mark.parametrize("config", [basic(), bottleneck()], ids=["basic", "bottleneck"])
def test_the_floating_network_answers_bit_by_bit_as_before_and_int8_much_better(config: ResNetConfig) -> None:
    network = badly_scaled(config)
    x = images(config, 32)
    before, worse = network(x)[0], int8_error(network, x)
    equalize(network, [(x[:16],), (x[16:],)])
    assert torch.equal(network(x)[0], before)
    assert worse > 0.1  # or there is nothing to mend
    assert int8_error(network, x) < 0.3 * worse


def _names(found: list[Link]) -> list[tuple[set[str], set[str]]]:
    def named(nodes: list[Node]) -> set[str]:
        return {str(node.args[1].target).removesuffix(".weight") for node in nodes}  # type: ignore[union-attr]

    return [(named(each.writers), named(each.readers)) for each in found]


def test_every_layer_of_a_residual_network_writes_and_reads_once() -> None:
    for config in (basic(), bottleneck()):
        found = _names(links(prepared(network_of(random_resnet(config)))))
        layers = [name for name, module in random_resnet(config).named_modules() if isinstance(module, ConvNorm)]
        assert sorted(name for writers, _ in found for name in writers) == sorted(layers)
        assert sorted(name for _, readers in found for name in readers) == sorted(
            name for name in (*layers, "fc") if name != "stem"  # the image's own scale is fixed
        )  # fmt: skip


class Mixed(nn.Module):
    """What a factor passes through and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.padded, self.read, self.clipped, self.gated, self.shown = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(5))
        self.deep = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.padded(images))
        x = torch.relu(self.read(nn.functional.pad(x, (1, 0, 1, 0))))
        x = nn.functional.relu6(self.clipped(x))
        x = self.gated(nn.functional.max_pool2d(nn.functional.leaky_relu(self.deep(x)), 2))
        x = self.shown(torch.sigmoid(x))
        return self.down(torch.relu(self.up(x.flatten(2).transpose(1, 2)))), x


@torch.no_grad()
def test_what_cuts_bends_or_shows_a_value_fixes_its_scale() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9)
    network = prepared(from_torch(Mixed(), (x,)))
    assert _names(links(network)) == [
        ({"padded"}, {"read"}), ({"read"}, {"clipped"}), ({"deep"}, {"gated"}), ({"up"}, {"down"}),
    ]  # fmt: skip
    for name in ("padded", "deep", "up"):
        tensor_at(network.module, f"{name}.weight")[1] *= 64
    before = network(x)
    weights = {name: value.clone() for name, value in network.module.state_dict().items()}
    equalize(network, [(x,)])
    assert all(torch.equal(one, other) for one, other in zip(network(x), before, strict=True))
    changed = {name for name, value in network.module.state_dict().items() if not torch.equal(value, weights[name])}
    assert {"padded.weight", "padded.bias", "deep.bias", "gated.weight", "up.weight", "down.weight"} <= changed
    assert not {"gated.bias", "shown.weight", "shown.bias", "down.bias"} & changed


@torch.no_grad()
def test_dead_channels_stay_and_damage_is_refused_by_name() -> None:
    model = random_resnet(basic())
    model.stem.norm.weight.zero_()
    model.stem.norm.bias.zero_()
    network, x = prepared(network_of(model)), images(basic())
    before = network(x)[0]
    equalize(network, [(x,)])
    assert torch.equal(network(x)[0], before)
    with pytest.raises(InputError, match="do not fit the model"):
        equalize(network, [(torch.zeros(2, 3, 12, 12),)])
    tensor_at(network.module, "blocks.0.layers.0.bias").fill_(3e38)
    with pytest.raises(InputError, match="an activation holds NaN"):
        equalize(network, [(x,)])
    tensor_at(network.module, "fc.weight")[0, 0] = float("nan")
    with pytest.raises(InputError, match=r"fc\.weight holds NaN"):
        equalize(network, [(x,)])
