"""The dependency graph on random networks, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penjing.compress.prune.graph import Place, dependency_graph
from penjing.compress.prune.surgery import mask, remove
from penjing.core.errors import InputError
from tests.compress.prune.architectures import ViT

KINDS = ("conv", "residual", "depthwise", "grouped", "dense", "gate", "shuffle", "split", "group_norm", "tanh")


class Random(nn.Module):
    """Layers by name, 16 channels wide between them (a concatenation is brought back to 16), then a classifier."""

    def __init__(self, kinds: list[str], flat: bool):
        super().__init__()
        self.kinds, self.flat = kinds, flat
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.layers = nn.ModuleList(self._layer(kind) for kind in kinds)
        self.fc = nn.Linear(16 * (16 if flat else 1), 5)

    @staticmethod
    def _layer(kind: str) -> nn.Module:
        if kind == "dense":
            return nn.ModuleList([nn.Conv2d(16, 8, 1), nn.Conv2d(24, 16, 3, padding=1)])
        if kind == "gate":
            return nn.ModuleList([nn.Conv2d(16, 8, 1), nn.Conv2d(8, 16, 1)])
        if kind == "group_norm":
            return nn.ModuleList([nn.Conv2d(16, 16, 1), nn.GroupNorm(16, 16)])
        groups = {"depthwise": 16, "grouped": 4, "shuffle": 4}.get(kind, 1)
        width = 8 if kind == "split" else 16
        return nn.ModuleList([nn.Conv2d(width, width, 3, padding=1, groups=groups), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            first, second = layer  # pyright: ignore[reportGeneralTypeIssues]
            if kind == "residual":
                x = x + torch.relu(second(first(x)))
            elif kind == "dense":
                x = second(torch.cat([x, torch.relu(first(x))], 1))
            elif kind == "gate":
                x = x * torch.sigmoid(second(torch.relu(first(x.mean((2, 3), keepdim=True)))))
            elif kind == "shuffle":
                x = second(first(x))
                x = x.unflatten(1, (4, x.shape[1] // 4)).transpose(1, 2).flatten(1, 2)
            elif kind == "split":
                left, right = x.chunk(2, 1)
                x = torch.cat([second(first(left)), right], 1)
            elif kind == "tanh":
                x = torch.tanh(second(first(x)))
            else:
                x = F.silu(second(first(x)))
        x = F.adaptive_avg_pool2d(x, 4 if self.flat else 1)
        return self.fc(x.flatten(1))


@settings(max_examples=25, deadline=None)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=5), flat=st.booleans(), seed=st.integers(0, 10**6))
def test_any_selection_of_units_leaves_the_masked_network(kinds: list[str], flat: bool, seed: int) -> None:
    torch.manual_seed(seed)
    model = Random(kinds, flat).eval()
    example = (torch.randn(2, 3, 4, 4),)
    graph = dependency_graph(model, example)
    selection = []
    for group in graph.groups:
        if any("layers" in p.tensor and kinds[int(p.tensor.split(".")[1])] == "group_norm" for p in group.places):
            continue  # a norm over one channel each: its statistics are the channel's own, but its number is fixed
        gone = [unit for unit in range(len(group)) if torch.rand(()) < 0.4]
        selection.append((group, gone[: len(group) - 1]))
    pruned, masked = copy.deepcopy(model), copy.deepcopy(model)
    remove(pruned, selection)
    mask(masked, selection)
    with torch.no_grad():
        expected = masked(*example)
        torch.testing.assert_close(pruned(*example), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


class Fused(ViT):
    """Query, key and value in one projection, cut by a view."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.attention[0].o(x).mean(1))  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]


def test_a_fused_projection_loses_whole_heads() -> None:
    graph = dependency_graph(Fused().eval(), (torch.randn(2, 3, 16, 16),))
    (group,) = (group for group in graph.groups if Place("qkv.weight", 0) in group.places)
    (place,) = (index for index, place in enumerate(group.places) if place.tensor == "qkv.weight" and place.dim == 0)
    assert group.units[1][place].tolist() == [part * 32 + 8 + feature for part in range(3) for feature in range(8)]
    assert len(group) == 4


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.third, self.fourth = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(torch.fft.fft(self.first(x)).real)))


class ByValue(Unknown):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) if x.sum() > 0 else x


def test_what_flows_through_an_operation_without_a_rule_stays_and_is_named() -> None:
    graph = dependency_graph(Unknown(), (torch.randn(2, 8),))
    assert [group.name for group in graph.groups] == ["second.weight[dim 0]", "third.weight[dim 0]"]
    (reason,) = graph.reasons
    assert "fft" in reason
    assert "no rule" in reason


def test_refuses_control_flow_that_depends_on_values() -> None:
    with pytest.raises(InputError, match="control flow"):
        dependency_graph(ByValue(), (torch.randn(2, 8),))


def test_inputs_outputs_and_protected_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    example = (torch.randn(2, 6),)
    assert [group.name for group in dependency_graph(model, example).groups] == ["0.weight[dim 0]", "2.weight[dim 0]"]
    protected = dependency_graph(model, example, protect=["2.*"])
    assert [group.name for group in protected.groups] == []
    assert model.training


def test_a_dimension_never_vanishes() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    group = dependency_graph(model, (torch.randn(2, 6),)).groups[0]
    with pytest.raises(InputError, match="would lose all 8"):
        remove(model, [(group, range(8))])
    assert model(torch.randn(2, 6)).shape == (2, 3)


def test_optimizer_state_follows_its_weights() -> None:
    """Removing units that are zero, and stay so, changes neither the loss nor the steps after it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    group = dependency_graph(model, (x,)).groups[0]
    mask(model, [(group, [1, 5])])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        loss = F.mse_loss(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        step(model, optimizer)
    twin = copy.deepcopy(model)
    twin_optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    remove(model, [(group, [1, 5])], optimizer)
    assert [p.shape for p in model.parameters()] == [(6, 6), (6,), (3, 6), (3,)]
    losses = [(step(model, optimizer), step(twin, twin_optimizer)) for _ in range(5)]
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, rel=1e-5)
