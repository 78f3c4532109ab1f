"""Files that somebody altered: each is refused by one error, and none is read outside its folder."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from penjing.core.errors import InputError, PenjingError
from penjing.core.onnx_reader.read import from_onnx

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch 2.13 of its own code
NODES = (
    helper.make_node("MatMul", ["x", "w"], ["h"]),
    helper.make_node("Reshape", ["h", "s"], ["r"]),
    helper.make_node("Relu", ["r"], ["y"]),
)


def _model(nodes: tuple[onnx.NodeProto, ...] = NODES, shape: tuple[int, ...] = (2, 3)) -> onnx.ModelProto:
    weights = [
        numpy_helper.from_array(np.ones((3, 4), np.float32), "w"),
        numpy_helper.from_array(np.array([4, 2]), "s"),
    ]
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _written(path: Path, model: onnx.ModelProto) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"location": "../w.bin"}, "outside the folder"),
        ({"location": "/etc/passwd"}, "outside the folder"),
        ({"location": "link.bin"}, "outside the folder"),
        ({"location": "pipe.bin"}, "is missing"),
        ({"location": "w\0.bin"}, "can be the name of no file"),
        ({"location": "a" * 5000}, "can be the name of no file"),
        ({"location": "w.bin", "offset": "8"}, "ends before w"),
        ({"location": "w.bin", "length": str(10**15)}, "ends before w"),
        ({"location": "w.bin", "offset": "-8"}, "no complete ONNX file"),
        ({"location": "w.bin", "offset": "one"}, "no complete ONNX file"),
    ],
)
def test_weights_that_lie_elsewhere(entries: dict[str, str], said: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(48))
    (tmp_path / "in" / "w.bin").write_bytes(bytes(48))
    (tmp_path / "in" / "link.bin").symlink_to(tmp_path / "w.bin")
    os.mkfifo(tmp_path / "in" / "pipe.bin")
    model = _model()
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)
    with pytest.raises(InputError, match=said) as caught:
        from_onnx(_written(tmp_path / "in" / "a.onnx", model))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("shape", [(10**6, 10**6), (1 << 62, 4)])
def test_an_input_that_no_memory_holds(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = _written(tmp_path / "a.onnx", _model((helper.make_node("Relu", ["x"], ["y"]),), shape))
    with pytest.raises(InputError, match="say a smaller example"):
        from_onnx(path)


@pytest.mark.parametrize("name", ["x" * 10_000, "a/b", "a\nb", "self", "lambda", "é", "%s{}"])
def test_names_of_any_kind(name: str, tmp_path: Path) -> None:
    def renamed(names: list[str]) -> onnx.ModelProto:
        model = _model()
        for place in (model.graph.input[0], *(weight for weight in model.graph.initializer), model.graph.output[0]):
            place.name = name if place.name in names else place.name
        for node in model.graph.node:
            node.input[:] = [name if value in names else value for value in node.input]
            node.output[:] = [name if value in names else value for value in node.output]
        return model

    for names in (["x"], ["w"], ["y"]):
        network = from_onnx(_written(tmp_path / "a.onnx", renamed(names))).network
        assert network.config.inputs[0].name.isidentifier()
        assert len(network.config.outputs[0].name) < 200


def test_outputs_whose_names_become_the_same_stay_two(tmp_path: Path) -> None:
    model = _model((*NODES[:2], helper.make_node("Relu", ["r"], ["y z"]), helper.make_node("Neg", ["r"], ["y_z"])))
    del model.graph.output[:]
    model.graph.output.extend([helper.make_empty_tensor_value_info(name) for name in ("y z", "y_z")])
    outputs = from_onnx(_written(tmp_path / "a.onnx", model)).network.config.outputs
    assert [spec.name for spec in outputs] == ["y_z", "y_z_"]


def test_operators_in_any_order_are_sorted_and_circles_refused(tmp_path: Path) -> None:
    network = from_onnx(_written(tmp_path / "a.onnx", _model(NODES[::-1]))).network
    assert network.config.outputs[0].shape == (4, 2)
    circle = (helper.make_node("Add", ["x", "y"], ["a"]), helper.make_node("Relu", ["a"], ["y"]))
    with pytest.raises(InputError):
        from_onnx(_written(tmp_path / "b.onnx", _model(circle)))


def _bytes(model: onnx.ModelProto, draw: random.Random) -> bytes:
    data = bytearray(model.SerializeToString())
    for _ in range(draw.choice([1, 2, 8])):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.randrange(1, len(data))] if draw.random() < 0.2 else data)


def _sizes(model: onnx.ModelProto, draw: random.Random) -> bytes:
    weight = draw.choice(model.graph.initializer)
    weight.dims[draw.randrange(len(weight.dims))] = draw.choice([0, -1, 2, 7, 10**12, 1 << 62, -(1 << 63)])
    return model.SerializeToString()


def _types(model: onnx.ModelProto, draw: random.Random) -> bytes:
    draw.choice(model.graph.initializer).data_type = draw.randrange(26)
    model.graph.input[0].type.tensor_type.elem_type = draw.choice([1, 1, 7, 8, 11, 16, 17])
    return model.SerializeToString()


def _edges(model: onnx.ModelProto, draw: random.Random) -> bytes:
    node = draw.choice(model.graph.node)
    node.input[draw.randrange(len(node.input))] = draw.choice(["x", "w", "s", "h", "r", "y", "", "nobody", "\0"])
    return model.SerializeToString()


@pytest.mark.parametrize("alter", [_bytes, _sizes, _types, _edges])
def test_an_altered_file_comes_in_or_is_refused(
    alter: Callable[[onnx.ModelProto, random.Random], bytes], tmp_path: Path
) -> None:
    for seed in range(40):
        path = tmp_path / "a.onnx"
        path.write_bytes(alter(_model(), random.Random(seed)))
        with suppress(PenjingError):
            from_onnx(path)
