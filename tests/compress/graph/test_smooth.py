"""Smoothing changes no answer of the floating network, brings back what large channels cost, and costs nothing where a
layer can take it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.place import apply_quantization
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.smooth import ROWS, Input, smooth
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, operator_name, tensor_at
from penjing.core.graph.trace import from_torch

WIDTH, LARGE = 32, 100.0
X = torch.randn(32, 12, WIDTH, generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """(batch, length, 32) → the same: a norm that the MLP alone reads, another one that a sum reads too."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.shared, self.own = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x)
        parts = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*parts)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.own(x))))


@torch.no_grad()
def with_large_channels() -> Layer:
    """Channel 3 of the values, of both norms and of what GELU gives is `LARGE` times as large as the others."""
    layer = Layer().eval()
    for rows, readers in (
        ((layer.value.weight, layer.value.bias), (layer.output,)),
        ((layer.own.weight, layer.own.bias), (layer.up,)),
        ((layer.shared.weight, layer.shared.bias), (layer.query, layer.key, layer.value)),
    ):
        for value in rows:
            value[3] *= LARGE
        for reader in readers:
            reader.weight[:, 3] /= LARGE
    layer.up.bias[3] += LARGE
    layer.down.weight[:, 3] /= LARGE
    return layer


def constants(network: Network) -> set[str]:
    return {str(node.target) for node in network.module.graph.find_nodes(op="get_attr")}


@torch.no_grad()
def test_answers_stay_and_int8_is_nearer() -> None:
    network = prepared(from_torch(with_large_channels(), (X,)))
    (before,) = network(X)
    errors = []
    for smoothing in (False, True):
        made = network.copy()
        if smoothing:
            assert set(smooth(made, [(X,)], GraphSettings())) == {
                "query.weight", "output.weight", "up.weight", "down.weight",
            }  # fmt: skip
            assert torch.allclose(made(X)[0], before, rtol=1e-4, atol=1e-4 * float(before.abs().max()))
        quantized = apply_quantization(made, GraphSettings())
        calibrate_graph(quantized, [(X,)])
        errors.append(float((quantized(X)[0] - before)[..., 4:].norm()))
    assert errors[1] < 0.25 * errors[0]


@torch.no_grad()
def test_layers_and_norms_take_the_division_where_nothing_else_reads_them() -> None:
    network = prepared(from_torch(with_large_channels(), (X,)))
    before = {name: tensor_at(network.module, name).clone() for name in ("value.weight", "own.weight", "shared.weight")}
    smooth(network, [(X,)], GraphSettings())
    products = [str(node) for node in network.module.graph.nodes if operator_name(node) == "mul"]
    assert len(products) == 2 + 1  # attention's scale; behind the norm that a sum reads too, and behind GELU
    assert len([name for name in constants(network) if name.startswith("smoothing.")]) == 2
    changed = {name: not torch.equal(tensor_at(network.module, name), value) for name, value in before.items()}
    assert changed == {"value.weight": True, "own.weight": True, "shared.weight": False}


class Mixed(nn.Module):
    """(batch, length, 32) → the same: channels change their order between two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.first.weight[3] *= LARGE
            self.second.weight[:, 24] /= LARGE

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).unflatten(-1, (4, 8)).transpose(2, 3).flatten(2))


@torch.no_grad()
def test_a_factor_that_comes_out_at_another_channel_becomes_a_product() -> None:
    network = prepared(from_torch(Mixed().eval(), (X,)))
    (before,) = network(X)
    assert set(smooth(network, [(X,)], GraphSettings())) == {"second.weight"}
    assert [name for name in constants(network) if name.startswith("smoothing.")]
    assert torch.allclose(network(X)[0], before, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_what_stays_floating_or_has_no_large_channels_is_left_as_it_is() -> None:
    network = prepared(from_torch(with_large_channels(), (X,)))
    found = smooth(network, [(X,)], GraphSettings(keep=("down", "output")))
    assert set(found) == {"query.weight", "up.weight"}
    network = prepared(from_torch(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 8)).eval(), (X,)))
    smooth(network, [(X,)], GraphSettings())
    assert not [name for name in constants(network) if name.startswith("smoothing.")]


@torch.no_grad()
def test_a_few_rows_say_nothing_of_single_channels() -> None:
    network = prepared(from_torch(with_large_channels(), (X,)))
    assert not smooth(network, [(X[:8],), (X[8:16],)], GraphSettings())


@pytest.mark.parametrize(("batches", "size"), [(100, 64), (5, 5000), (300, 7), (1, 40000), (3, 12)])
def test_rows_are_kept_evenly_over_all_batches_and_over_the_places_of_windows(batches: int, size: int) -> None:
    seen = Input(torch.fx.Graph().placeholder("x"))
    every = torch.arange(batches * size, dtype=torch.float32)[:, None]
    for part in every.split(size):
        seen.see(part[None])
    rows = seen.rows()
    assert seen.count == len(every)
    assert min(len(every), ROWS // 2) <= len(rows) <= ROWS
    steps = rows.diff(dim=0)
    assert (steps == steps[0]).all()
    assert len((rows % 128).unique()) >= min(len(rows), 64)  # of windows of 128


def test_weights_that_are_no_numbers_are_named() -> None:
    layer = Layer().eval()
    with torch.no_grad():
        layer.up.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"up\.weight holds NaN"):
        smooth(prepared(from_torch(layer, (X,))), [(X,)], GraphSettings())
