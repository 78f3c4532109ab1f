"""Passes on graphs: what was written out becomes whole, what changes nothing goes, answers stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penjing.core.graph.compare import distance
from penjing.core.graph.network import Network, operator_name, tensors_of
from penjing.core.graph.passes import PASSES, simplify
from penjing.core.graph.trace import from_torch
from tests.core.graph.networks import Attention, Residual


class Written(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.matrix = nn.Parameter(torch.randn(8, 8))
        self.table: Tensor
        self.register_buffer("table", torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def norm(m: Written, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * m.weight + m.bias


def norm_of_powers(_: Written, x: Tensor) -> Tensor:
    mean = x.mean(2, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(2, keepdim=True) + 1e-6)


def masked(m: Written, x: Tensor) -> Tensor:
    scores = torch.matmul(x * 0.5, x.permute(0, 2, 1) * 0.5) + m.table[:, :3]
    return torch.matmul(torch.softmax(scores, -1), x)


CASES: list[tuple[Callable[..., Tensor], str, int]] = [
    (norm, "layer_norm", 1),
    (norm_of_powers, "layer_norm", 1),
    (lambda _, x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), "gelu", 1),
    (lambda _, x: x * (torch.erf(x * math.sqrt(0.5)) + 1) * 0.5, "gelu", 1),
    (lambda _, x: 0.5 * (x * (torch.erf(x / 1.4142135) + 1)), "gelu", 1),
    (lambda _, x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), "gelu", 1),
    (lambda _, x: x * torch.sigmoid(x), "silu", 1),
    (lambda _, x: x * F.relu6(x + 3) / 6, "hardswish", 1),
    (lambda _, x: x * (F.hardtanh(x + 3, 0, 6) / 6), "hardswish", 1),
    (lambda _, x: x * F.hardsigmoid(x), "hardswish", 1),
    (lambda _, x: x * torch.tanh(F.softplus(x)), "mish", 1),
    (masked, "scaled_dot_product_attention", 1),
    (lambda m, x: F.linear(x, m.matrix) + m.bias, "linear", 1),
    (lambda _, x: x.permute(1, 0, 2).permute(1, 0, 2) * 2, "mul", 1),
    (lambda _, x: x.transpose(0, 2).transpose(0, 1).permute(1, 2, 0).relu(), "relu", 2),
    (lambda _, x: torch.relu(x.reshape(-1, 3, 8) * 1 + 0), "relu", 1),
    (lambda _, x: torch.relu(x) * torch.relu(x).sum(), "relu", 3),
    (lambda m, x: x + (m.table * 2).exp(), "add", 1),
]


def operators(network: Network) -> list[str]:
    return [operator_name(node) for node in network.module.graph.nodes if operator_name(node)]


@pytest.mark.parametrize(("function", "name", "left"), CASES)
def test_what_was_written_out_becomes_whole(function: Callable[..., Tensor], name: str, left: int) -> None:
    torch.manual_seed(0)
    network = from_torch(Written(function), (torch.randn(2, 3, 8),))
    made, gains = simplify(network)
    found = [one for one in operators(made) if not one.startswith("sym_")]
    assert name in found
    assert len(found) == left or name.startswith("scaled")
    assert [gain.changed > 0 for gain in gains] == [True] * len(gains) != []
    x = torch.randn(5, 3, 8)
    assert distance(made(x)[0], network(x)[0]) < 1e-6


SAME: list[Callable[..., Tensor]] = [
    lambda _, x: x * 0.4 * (1 + torch.erf(x / math.sqrt(2))),
    lambda _, x: x * torch.sigmoid(x * 2),
    lambda _, x: (
        (x - x.mean(1, keepdim=True)) / torch.sqrt((x - x.mean(-1, keepdim=True)).pow(2).mean(-1, True) + 1e-5)
    ),
    lambda m, x: torch.add(F.linear(x, m.matrix), m.bias, alpha=2),
    lambda _, x: torch.matmul(torch.softmax(torch.matmul(x, x.transpose(1, 2)), 1), x),
]


@pytest.mark.parametrize("function", SAME)
def test_what_only_looks_alike_stays(function: Callable[..., Tensor]) -> None:
    network = from_torch(Written(function), (torch.randn(2, 3, 8),))
    made, _ = simplify(network)
    x = torch.randn(4, 3, 8)
    assert distance(made(x)[0], network(x)[0]) < 1e-6
    assert not {"gelu", "silu", "layer_norm", "scaled_dot_product_attention"} & set(operators(made))


def test_what_is_trained_and_what_differs_in_training_stays() -> None:
    for module, example in ((Residual(), torch.randn(2, 3, 16, 16)), (Attention(), torch.randint(50, (2, 7)))):
        network = from_torch(module.eval(), (example,))
        made, _ = simplify(network)
        assert {name for name, _ in made.module.named_parameters()} == {name for name, _ in module.named_parameters()}
        assert operators(made).count("dropout") == operators(network).count("dropout")
        assert operators(made).count("batch_norm") == operators(network).count("batch_norm")


def test_a_pass_that_changes_answers_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(network: Network) -> int:
        for tensor in tensors_of(network.module).values():
            tensor.data.mul_(2)
        return 1

    monkeypatch.setitem(PASSES, "wrong", doubled)
    network = from_torch(Residual().eval(), (torch.randn(2, 3, 16, 16),))
    made, gains = simplify(network)
    assert [gain.changed for gain in gains if gain.name == "wrong"] == [0]
    assert distance(made(*made.inputs())[0], network(*network.inputs())[0]) == 0
