"""Whole ONNX files: what comes in answers as ONNX Runtime does, what cannot is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from penjing.core.errors import InputError
from penjing.core.graph.network import operator_name
from penjing.core.onnx_reader.module import OPERATORS
from penjing.core.onnx_reader.read import from_onnx
from tests.core.graph.networks import Attention, Residual

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch 2.13 of its own code


def exported(module: nn.Module, example: tuple[torch.Tensor, ...], path: Path, **settings: object) -> Path:
    torch.manual_seed(0)
    torch.onnx.export(module.eval(), example, path, dynamo=True, verbose=False, external_data=False, **settings)  # type: ignore[arg-type]
    return path


def test_a_convolutional_network_keeps_its_layers_and_its_batch(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch")
    path = exported(
        Residual(), (torch.randn(2, 3, 16, 16),), tmp_path / "a.onnx", dynamic_shapes=({0: batch},), optimize=False
    )
    found = from_onnx(path)
    assert found.parity["distance"] < 1e-5
    assert found.network.config.inputs[0].shape == ("batch", 3, 16, 16)
    names = [operator_name(node) for node in found.network.module.graph.nodes]
    assert names.count("conv2d") == 2
    assert names.count("linear") == 1
    assert found.network(torch.randn(5, 3, 16, 16))[0].shape == (5, 10)


def test_sizes_that_a_network_computes_stay_open(tmp_path: Path) -> None:
    axes = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    path = exported(Attention(), (torch.randint(10, (2, 7)),), tmp_path / "a.onnx", dynamic_shapes=axes)
    network = from_onnx(path).network
    assert network.config.inputs[0].shape == ("batch", "length")
    assert network(torch.randint(10, (3, 11)))[0].shape == (3, 11, 24)


def small(
    *nodes: onnx.NodeProto, opset: int = 17, shape: Sequence[int | str] | None = (2, 3), **weights: torch.Tensor
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value.numpy(), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def written(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


RELU = helper.make_node("Relu", ["x"], ["y"], name="the_relu")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (small(RELU, opset=6), "versions 7 to 24"),
        (small(RELU, opset=25), "versions 7 to 24"),
        (small(RELU, shape=None), "--input x"),
        (
            small(helper.make_node("Magic", ["x"], ["y"], name="abra", domain="my.own")),
            "abra is of the domain 'my.own'",
        ),
        (small(helper.make_node("NonZero", ["x"], ["i"]), helper.make_node("Cast", ["i"], ["y"], to=1)), "NonZero"),
        (small(helper.make_node("Det", ["x"], ["y"], name="det"), shape=(3, 3)), "Det det"),
    ],
)
def test_what_cannot_be_taken_is_named(model: onnx.ModelProto, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        from_onnx(written(tmp_path / "a.onnx", model))


def test_a_branch_that_an_input_of_one_value_decides_is_taken(tmp_path: Path) -> None:
    def branch(name: str, factor: float) -> onnx.GraphProto:
        weight = numpy_helper.from_array(torch.full((2, 3), factor).numpy(), f"{name}_w")
        node = helper.make_node("Mul", ["x", f"{name}_w"], [f"{name}_y"])
        result = helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, ["batch", 3])
        return helper.make_graph([node], name, [], [result], [weight])

    nodes = [
        helper.make_node("Equal", ["rate", "high"], ["is_high"]),
        helper.make_node("If", ["is_high"], ["y"], then_branch=branch("a", 2.0), else_branch=branch("b", 3.0)),
    ]
    model = small(*nodes, high=torch.tensor(16000))
    model.graph.input.append(helper.make_tensor_value_info("rate", TensorProto.INT64, []))
    path = written(tmp_path / "a.onnx", model)
    with pytest.raises(InputError, match="chooses by values"):
        from_onnx(path)
    for rate, factor in ((16000, 2.0), (8000, 3.0)):
        network = from_onnx(path, fixed={"rate": rate}).network
        x = torch.randn(2, 3)
        torch.testing.assert_close(network(x)[0], x * factor)


def test_branches_that_use_the_same_names_keep_their_own_values(tmp_path: Path) -> None:
    def branch(shift: float) -> onnx.GraphProto:
        nodes = [helper.make_node("Neg", ["w"], ["v"]), helper.make_node("Add", ["x", "v"], ["z"])]
        weight = numpy_helper.from_array(torch.full((3,), shift).numpy(), "w")
        return helper.make_graph(nodes, "one", [], [helper.make_empty_tensor_value_info("z")], [weight])

    nodes = [
        helper.make_node("If", ["yes"], ["a"], then_branch=branch(2.0), else_branch=branch(3.0)),
        helper.make_node("If", ["yes"], ["b"], then_branch=branch(4.0), else_branch=branch(5.0)),
        helper.make_node("Mul", ["a", "b"], ["y"]),
    ]
    network = from_onnx(written(tmp_path / "a.onnx", small(*nodes, yes=torch.tensor(True)))).network
    x = torch.randn(2, 3)
    torch.testing.assert_close(network(x)[0], (x - 2) * (x - 4))


def test_an_output_of_another_type_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.onnx", small(RELU))
    monkeypatch.setitem(OPERATORS, "Relu", lambda call: torch.relu(call.tensor(0)).double())
    with pytest.raises(InputError, match="y is float64, and that of ONNX Runtime float32"):
        from_onnx(path)


@pytest.mark.parametrize("value", [1e30, float("nan"), float("inf"), 2.5, -1.0, 256.0])
def test_a_fixed_value_must_be_one_of_its_type(value: float, tmp_path: Path) -> None:
    model = small(helper.make_node("Cast", ["k"], ["f"], to=1), helper.make_node("Add", ["x", "f"], ["y"]))
    model.graph.input.append(helper.make_tensor_value_info("k", TensorProto.UINT8, []))
    with pytest.raises(InputError, match=r"k=.* whole number from 0 to 255"):
        from_onnx(written(tmp_path / "a.onnx", model), fixed={"k": value})


def test_an_axis_that_an_input_has_not_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x:7=foo: the input has 2 axes, 0 to 1"):
        from_onnx(written(tmp_path / "a.onnx", small(RELU)), dynamic={"x": {7: "foo"}})


def test_an_axis_that_a_file_leaves_open_stays_so_where_the_example_has_one_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.onnx", small(RELU, shape=("n", 3)))
    assert from_onnx(path, shapes={"x": (1, 3)}).network.config.inputs[0].shape == ("n", 3)


def test_an_axis_that_a_file_fixes_at_one_is_fixed(tmp_path: Path) -> None:
    path = written(tmp_path / "a.onnx", small(RELU, shape=(1, 3)))
    assert from_onnx(path, dynamic={"x": {0: "n"}}).network.config.inputs[0].shape == (1, 3)


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)


def test_sizes_of_outputs_are_said_in_names_of_inputs(tmp_path: Path) -> None:
    axes = ({0: torch.export.Dim("batch")},)
    path = exported(Flat(), (torch.randn(2, 3, 4),), tmp_path / "a.onnx", dynamic_shapes=axes)
    assert from_onnx(path).network.config.outputs[0].shape == ("3*batch", 4)
