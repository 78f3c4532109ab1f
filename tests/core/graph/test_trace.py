from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penjing.core.errors import InputError
from penjing.core.graph.network import Network, operator_name
from penjing.core.graph.trace import from_torch, without_ones
from tests.core.graph.networks import Attention, Residual


def _operators(network: Network) -> list[str]:
    return [operator_name(node) for node in network.module.graph.nodes if operator_name(node)]


def test_a_network_answers_as_the_module_at_any_batch() -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    network = from_torch(model, (torch.randn(1, 3, 16, 16),))
    assert network.config.inputs[0].shape == ("batch", 3, 16, 16)
    assert network.config.outputs[0].shape == ("batch", 10)
    images = torch.randn(5, 3, 16, 16)
    torch.testing.assert_close(network(images)[0], model(images))


def test_nothing_writes_into_its_arguments_and_layers_stay_whole() -> None:
    found = _operators(from_torch(Residual(), (torch.randn(2, 3, 16, 16),)))
    assert not any(name.endswith("_") for name in found)
    assert {"conv2d", "batch_norm", "relu", "add", "dropout", "linear"} <= set(found)


class Standardised(nn.Module):
    """(batch, 4) → (batch, 6): a weight whose rows are normalised, as timm's NFNet does by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = nn.functional.batch_norm(self.weight.reshape(1, 6, -1), None, None, training=True, momentum=0.0)
        return x @ rows.reshape_as(self.weight).T


def test_a_batch_norm_without_statistics_measures_in_either_mode() -> None:
    model = Standardised().eval()
    x = torch.randn(3, 4)
    network = from_torch(model, (x,))
    for mode in (True, False):
        network.module.train(mode)
        torch.testing.assert_close(network(x)[0], model(x))


def test_batch_norms_and_dropouts_follow_the_mode_and_copies_keep_their_own() -> None:
    torch.manual_seed(0)
    network = from_torch(Residual(), (torch.randn(4, 3, 16, 16),))
    copy = network.copy()
    network.module.train()
    before = network.module.get_buffer("first.1.running_mean").clone()
    one, other = network(*network.inputs())[0], network(*network.inputs())[0]
    assert not torch.equal(one, other)
    assert not torch.equal(before, network.module.get_buffer("first.1.running_mean"))
    torch.testing.assert_close(copy(*copy.inputs())[0], copy(*copy.inputs())[0], rtol=0, atol=0)
    network.module.eval()
    torch.testing.assert_close(network(*network.inputs())[0], network(*network.inputs())[0], rtol=0, atol=0)


def test_names_of_inputs_and_outputs_are_those_of_the_module() -> None:
    model = Attention().eval()
    axes = {"tokens": {0: "batch", 1: "length"}}
    network = from_torch(model, keyword={"tokens": torch.randint(50, (2, 7))}, dynamic=axes)
    assert [str(spec) for spec in network.config.inputs] == ["tokens: int64[batch, length]"]
    assert [str(spec) for spec in network.config.outputs] == ["hidden: float32[batch, length, 24]"]
    tokens = torch.randint(50, (3, 11))
    torch.testing.assert_close(network(tokens)[0], model(tokens)["hidden"])


class Masked(nn.Module):
    """Nothing in it makes the axes of its two inputs one for torch.export: each is looked at by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(mask)


def test_the_batches_of_two_inputs_are_one() -> None:
    network = from_torch(Masked().eval(), (torch.randn(3, 6), torch.randn(3, 3)))
    assert [spec.shape[0] for spec in (*network.config.inputs, *network.config.outputs)] == ["batch"] * 4
    assert network.config.batched


def test_axes_that_show_other_sizes_are_not_one() -> None:
    network = from_torch(Masked().eval(), (torch.randn(3, 6), torch.randn(5, 3)))
    assert [spec.shape[0] for spec in network.config.inputs] == ["batch", "mask_0"]
    assert not network.config.batched


def test_axes_of_one_name_are_one() -> None:
    axes = {"x": {0: "rows"}, "mask": {0: "rows"}}
    network = from_torch(Masked().eval(), (torch.randn(3, 6), torch.randn(3, 3)), dynamic=axes)
    assert [spec.shape[0] for spec in (*network.config.inputs, *network.config.outputs)] == ["rows"] * 4


def test_ones_become_twos_where_all_axes_of_a_name_have_them() -> None:
    x, y, z = torch.randn(1, 6), torch.randn(1, 1), torch.randn(3, 1)
    axes = [{0: "rows", 1: "long"}, {0: "rows", 1: "wide"}, {0: "deep", 1: "long"}]
    shapes = [tuple(value.shape) for value in without_ones([x, y, z, 7], [*axes, {0: "rows"}])[:3]]
    assert shapes == [(2, 6), (2, 2), (3, 1)]


class Joined(nn.Module):
    """The rows of both inputs below each other."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y])


def test_a_size_is_said_in_names_of_axes() -> None:
    network = from_torch(Joined(), (torch.randn(3, 6), torch.randn(3, 6)))
    assert network.config.outputs[0].shape == ("2*batch", 6)


class Written(nn.Module):
    """Assigns to a part of what is read as a whole later."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) * 2
        y[:, 1:3] = 1.0
        part = y[:, :2]
        y.add_(1)
        return part + y[:, 2:4]


def test_memory_that_is_seen_elsewhere_keeps_its_meaning() -> None:
    model = Written().eval()
    network = from_torch(model, (torch.randn(2, 6),))
    x = torch.randn(3, 6)
    torch.testing.assert_close(network(x)[0], model(x))
    assert "batch_norm" in _operators(network)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Sorting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.qr(x)[0]


@pytest.mark.parametrize(("model", "said"), [(Branching(), "depend on values"), (Sorting(), "linalg_qr")])
def test_what_cannot_be_taken_is_named(model: nn.Module, said: str) -> None:
    with pytest.raises(InputError, match=said):
        from_torch(model, (torch.randn(2, 3, 3),))


def test_inputs_that_the_module_does_not_take_are_named() -> None:
    with pytest.raises(InputError, match="does not take these inputs"):
        from_torch(Residual(), keyword={"pictures": torch.randn(2, 3, 16, 16)})
