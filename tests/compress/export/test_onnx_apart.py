"""What is taken apart before torch's exporter does it: the same files, without tracing a network once more."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.onnx._internal.exporter._registration import ONNXRegistry

from penjing.compress.export import onnx_graph
from penjing.compress.export.onnx_graph import export_network
from penjing.core.errors import InputError
from penjing.core.graph.apart import WHOLE, take_apart
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from penjing.core.runtime.onnx_runtime import open_graph

aten = torch.ops.aten


class Parts(nn.Module):
    """(batch, length, 6) → (batch, 8): each operator that is taken apart, at sizes that differ from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.norm.running_mean, self.norm.running_var = torch.randn(6), torch.rand(6) + 0.5
        self.head = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.dropout(x, 0.5, self.training).unflatten(-1, (2, -1)).flatten(2)
        normed = self.norm(heads.flatten(0, 1)).unflatten(0, (x.shape[0], x.shape[1]))
        mask = (1.0 - (normed > 0).to(torch.float32)).to(torch.float32)
        pooled = (normed * mask).sum(1)
        wide = pooled.unsqueeze(1).expand_as(x).mean(1)
        wide = wide.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6)
        return self.head(wide) @ (self.head.weight @ self.head.weight.T).T


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    axes = {"x": {0: "batch", 1: "length"}}
    return from_torch(Parts().eval(), keyword={"x": torch.randn(2, 3, 6)}, dynamic=axes)


def graph_of(path: Path) -> list[tuple[str, list[int], list[bytes]]]:
    """Operators, what they read by the place where it was made, and their attributes: all but names."""
    graph, place = onnx.load(str(path)).graph, dict[str, int]()
    return [
        (
            node.op_type,
            [place.setdefault(name, len(place)) for name in (*node.input, *node.output)],
            sorted(each.SerializeToString() for each in node.attribute),
        )
        for node in graph.node
    ]


@torch.no_grad()
def test_the_file_is_the_exporters_own_without_another_trace(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    present = {str(node.target) for node in network.module.graph.nodes}
    assert present >= {
        f"aten.{name}"
        for name in ("flatten.using_ints", "unflatten.int", "numpy_T.default", "expand_as.default", "to.dtype",
                     "rsub.Scalar", "dropout.default", "batch_norm.default")
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(onnx_graph, "take_apart", lambda graph: None)
        export_network(network, tmp_path / "theirs.onnx", {})
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *_: pytest.fail("another trace"))
    export_network(network, tmp_path / "ours.onnx", {})
    assert graph_of(tmp_path / "ours.onnx") == graph_of(tmp_path / "theirs.onnx")
    x = torch.randn(4, 5, 6)
    (found,) = open_graph(tmp_path / "ours.onnx", threads=1, names=(["x"], [network.config.outputs[0].name])).run(
        None, {"x": x.numpy()}
    )
    torch.testing.assert_close(torch.from_numpy(found), network(x)[0])


@torch.no_grad()
def test_what_nobody_took_apart_is_left_to_the_exporter(tmp_path: Path) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.square(x).flatten(1).movedim(0, 1)

    network, x = from_torch(Other(), (torch.randn(2, 3, 4),)), torch.randn(5, 3, 4)
    export_network(network, tmp_path / "a.onnx", {})
    names = [spec.name for spec in network.config.inputs], [spec.name for spec in network.config.outputs]
    (found,) = open_graph(tmp_path / "a.onnx", threads=1, names=names).run(None, {names[0][0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), network(x)[0])


def test_operators_that_stay_whole_have_a_form_in_onnx() -> None:
    registered = {found[0].fx_target for found in ONNXRegistry.from_torchlib(onnx_graph.OPSET).functions.values()}
    assert not set(WHOLE) - registered


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        (aten.reshape.default, (torch.randn(2, 3, 4).transpose(0, 1), [4, -1])),
        (aten.flatten.using_ints, (torch.randn(2, 3, 4, 5), 1, 2)),
        (aten.flatten.using_ints, (torch.randn(2, 3, 4, 5), -3)),
        (aten.flatten.using_ints, (torch.randn(2, 3, 4).transpose(0, 2),)),
        (aten.flatten.using_ints, (torch.tensor(2.0),)),
        (aten.unflatten.int, (torch.randn(2, 12), -1, [3, -1])),
        (aten.unflatten.int, (torch.randn(12, 2), 0, [4, 3])),
        (aten.numpy_T.default, (torch.randn(2, 3, 4),)),
        (aten.numpy_T.default, (torch.tensor(2.0),)),
        (aten.expand_as.default, (torch.randn(3, 1), torch.randn(2, 3, 4))),
        (aten.to.dtype, (torch.randn(3), torch.int64)),
        (aten.to.dtype, (torch.randn(3), torch.float32, False, False)),
        (aten.rsub.Scalar, (torch.randn(3), 2.0, 3)),
        (aten.dropout.default, (torch.randn(3), 0.5, False)),
        (
            aten.batch_norm.default,
            (torch.randn(2, 3), None, None, torch.randn(3), torch.rand(3), False, 0.1, 1e-5, False),
        ),
    ],
)
def test_parts_compute_what_the_operator_does(operator: object, given: tuple[object, ...]) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(operator, given))  # type: ignore[arg-type]
    parts = fx.GraphModule(nn.Module(), graph)
    take_apart(parts.graph)
    assert next(iter(parts.graph.nodes)).target is not operator
    expected, found = operator(*given), fx.Interpreter(parts).run()  # type: ignore[operator]
    torch.testing.assert_close(found, expected)
    assert found.dtype == expected.dtype


@torch.no_grad()
def test_an_average_keeps_a_divisor_of_its_own(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def __init__(self, ceil: bool) -> None:
            super().__init__()
            self.ceil = ceil

        def forward(self, x: Tensor) -> Tensor:
            flat = nn.functional.avg_pool2d(x, (3, 2), 2, 1, self.ceil, False, divisor_override=4)
            return flat + nn.functional.avg_pool3d(x, 1, divisor_override=5)[..., : flat.shape[2], : flat.shape[3]]

    x = torch.randn(2, 3, 7, 9)
    network = from_torch(Sums(False), (x,))
    export_network(network, tmp_path / "a.onnx", {})
    (found,) = open_graph(tmp_path / "a.onnx", threads=1, names=(["x"], [network.config.outputs[0].name])).run(
        None, {"x": x.numpy()}
    )
    torch.testing.assert_close(torch.from_numpy(found), Sums(False)(x))
    with pytest.raises(InputError, match="divisor_override and ceil_mode has no form in ONNX"):
        export_network(from_torch(Sums(True), (x,)), tmp_path / "b.onnx", {})


@torch.no_grad()
def test_logarithms_are_those_of_large_numbers_too(tmp_path: Path) -> None:
    class Logarithms(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.logsigmoid(x) + torch.logaddexp(x, x.flip(1)) - torch.logsumexp(x, 1, keepdim=True)

    x = torch.tensor([[-200.0, -50.0, -19.0, -1.0, 0.0, 3.0, 40.0, 200.0]])
    network = from_torch(Logarithms(), (x,))
    export_network(network, tmp_path / "a.onnx", {})
    names = [network.config.inputs[0].name], [network.config.outputs[0].name]
    (found,) = open_graph(tmp_path / "a.onnx", threads=1, names=names).run(None, {names[0][0]: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), Logarithms()(x))
