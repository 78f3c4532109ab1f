"""Networks whose sizes stay open: at sizes that the example did not have they answer as ONNX Runtime does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from penjing.core.graph.compare import distance
from penjing.core.graph.network import Network
from penjing.core.onnx_reader.read import from_onnx

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch 2.13 of its own code
_OPTIONS = onnxruntime.SessionOptions()
_OPTIONS.log_severity_level = 4


def _exported(module: nn.Module, example: Tensor, axes: dict[int, str], path: Path) -> Path:
    torch.manual_seed(0)
    sizes = ({axis: torch.export.Dim(name, min=1, max=4096) for axis, name in axes.items()},)
    torch.onnx.export(
        module.eval(), (example,), path, dynamo=True, verbose=False, external_data=False, dynamic_shapes=sizes
    )
    return path


def _file(path: Path, shape: Sequence[int | str], nodes: list[onnx.NodeProto], opset: int = 18, **weights: Any) -> Path:
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.array(value), name) for name, value in weights.items()],
    )
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8).SerializeToString()
    )
    return path


def _imported(path: Path, *inputs: Tensor) -> Network:
    """The network of the file, which was seen to answer on each of `inputs` as ONNX Runtime does."""
    network = from_onnx(path).network
    session = onnxruntime.InferenceSession(str(path), _OPTIONS)
    for value in inputs:
        theirs = torch.from_numpy(np.array(session.run(None, {session.get_inputs()[0].name: value.numpy()})[0]))
        ours = network(value)[0]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert distance(ours, theirs) < 1e-5
    return network


class Patches(nn.Module):
    """Images of 16 × 16 → (batch, 10), by a class token that is expanded, as a ViT does."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 16, 8, 8), nn.Linear(16, 10)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 5, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(images.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.layer(x)[:, 0])


class Words(nn.Module):
    """(batch, length) ids → (batch, length, 4), by a table of positions that are counted, as BERT does."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions, self.head = nn.Embedding(100, 16), nn.Embedding(64, 16), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        return self.head(self.layer(self.words(ids) + self.positions(places)))


def test_a_class_token_is_expanded_to_any_batch(tmp_path: Path) -> None:
    path = _exported(Patches(), torch.randn(2, 3, 16, 16), {0: "batch"}, tmp_path / "a.onnx")
    _imported(path, torch.randn(5, 3, 16, 16), torch.randn(1, 3, 16, 16))


def test_positions_are_counted_to_any_length_and_their_table_is_trained(tmp_path: Path) -> None:
    path = _exported(Words(), torch.randint(100, (2, 12)), {0: "batch", 1: "length"}, tmp_path / "a.onnx")
    network = _imported(path, torch.randint(100, (3, 7)), torch.randint(100, (1, 64)))
    assert {(100, 16), (64, 16)} <= {tuple(value.shape) for value in network.module.parameters()}


def test_a_size_that_may_be_left_as_it_is_stays_open(tmp_path: Path) -> None:
    """torch's older exporter says `token.expand(batch, -1, -1)` by a choice between -1 and sizes."""
    nodes = [
        helper.make_node("Shape", ["x"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "minus", "minus"], ["sizes"], axis=0),
        helper.make_node("Equal", ["sizes", "minus"], ["kept"]),
        helper.make_node("Where", ["kept", "ones", "sizes"], ["wanted"]),
        helper.make_node("Expand", ["token", "wanted"], ["tokens"]),
        helper.make_node("Concat", ["tokens", "x"], ["y"], axis=1),
    ]
    token = np.ones((1, 1, 4), np.float32)
    path = _file(tmp_path / "a.onnx", ["batch", 3, 4], nodes, token=token, minus=[-1], ones=[1, 1, 1])
    _imported(path, torch.randn(5, 3, 4), torch.randn(1, 3, 4))


class Enlarged(nn.Module):
    """A map of half the size is brought back to that of the images, as DeepLab does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.interpolate(self.layer(images), size=images.shape[2:], mode="bilinear")


class Filled(nn.Module):
    """Images are filled up to a multiple of 8."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        return nn.functional.pad(images, (0, -width % 8, 0, -height % 8))


@pytest.mark.parametrize("module", [Enlarged(), Filled()], ids=["enlarged", "filled"])
def test_images_are_brought_to_a_size_that_is_computed(module: nn.Module, tmp_path: Path) -> None:
    axes = {0: "batch", 2: "height", 3: "width"}
    path = _exported(module, torch.randn(2, 3, 16, 12), axes, tmp_path / "a.onnx")
    _imported(path, torch.randn(5, 3, 41, 23), torch.randn(1, 3, 24, 8))


def test_only_the_axes_that_change_are_resized(tmp_path: Path) -> None:
    node = helper.make_node("Resize", ["x", "", "", "sizes"], ["y"], axes=[2, 3], mode="linear")
    _imported(_file(tmp_path / "a.onnx", ["batch", 3, 8, 8], [node], sizes=[5, 6]), torch.randn(5, 3, 8, 8))


@pytest.mark.parametrize(
    "scale", [0.7, pytest.param(0.9, marks=pytest.mark.full), pytest.param(1.4, marks=pytest.mark.full), 5 / 3]
)
@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
def test_a_scaled_size_is_a_product_of_float32(scale: float, mode: str, tmp_path: Path) -> None:
    rule = "asymmetric" if mode == "nearest" else "half_pixel"
    settings: dict[str, Any] = {"coordinate_transformation_mode": rule, "nearest_mode": "floor"}
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode=mode, **settings)
    scales = np.array([1, 1, scale, scale], np.float32)
    _imported(_file(tmp_path / "a.onnx", [2, 3, 10, 10], [node], scales=scales), torch.randn(2, 3, 10, 10))
    others = [torch.randn(2, 3, 10, 20), torch.randn(2, 3, 30, 7), torch.randn(1, 3, 9, 40)]
    _imported(_file(tmp_path / "a.onnx", ["batch", 3, "height", "width"], [node], scales=scales), *others)


@pytest.mark.parametrize("operator", ["Mul", "Div"])
def test_a_size_times_a_fraction_is_a_product_of_float32(operator: str, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], start=1, end=2),
        helper.make_node("Cast", ["size"], ["float"], to=TensorProto.FLOAT),
        helper.make_node(operator, ["float", "factor"], ["scaled"]),
        helper.make_node("Floor", ["scaled"], ["whole"]),
        helper.make_node("Cast", ["whole"], ["end"], to=TensorProto.INT64),
        helper.make_node("Slice", ["x", "zero", "end", "one"], ["y"]),
    ]
    factor = np.array([0.7 if operator == "Mul" else 1.4], np.float32)
    held: dict[str, Any] = {"factor": factor, "zero": [0], "one": [1]}
    for length in (10, 14):
        _imported(_file(tmp_path / "a.onnx", ["batch", length, 4], nodes, **held), torch.randn(3, length, 4))
    path = _file(tmp_path / "a.onnx", ["batch", "length", 4], nodes, **held)
    _imported(path, *[torch.randn(3, length, 4) for length in (7, 10, 14, 20, 33)])


@pytest.mark.parametrize("how", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("operator", ["Conv", "MaxPool", "AveragePool"])
def test_pads_follow_an_open_size(operator: str, how: str, tmp_path: Path) -> None:
    """The example's 224 needs no pads, or even ones; 15 needs uneven ones."""
    held: dict[str, Any] = {"w": np.ones((4, 3, 2, 2), np.float32)} if operator == "Conv" else {}
    node = helper.make_node(operator, ["x", *held], ["y"], auto_pad=how, kernel_shape=[2, 2], strides=[2, 2])
    path = _file(tmp_path / "a.onnx", ["batch", 3, "height", "width"], [node], **held)
    _imported(path, torch.randn(2, 3, 15, 15), torch.randn(3, 3, 16, 15), torch.randn(1, 3, 17, 14))


@pytest.mark.parametrize("operator", ["MaxPool", "AveragePool"])
def test_no_window_begins_in_the_pads_of_an_open_size(operator: str, tmp_path: Path) -> None:
    node = helper.make_node(operator, ["x"], ["y"], pads=[0, 0, 1, 1], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1)
    path = _file(tmp_path / "a.onnx", ["batch", 3, "height", "width"], [node])
    _imported(path, torch.randn(2, 3, 15, 15), torch.randn(3, 3, 16, 15), torch.randn(1, 3, 17, 14))


@pytest.mark.parametrize(("operator", "settings"), [("Div", {}), ("Mod", {"fmod": 1}), ("Mod", {})])
@pytest.mark.parametrize("divisor", [3, -3])
def test_a_negative_difference_of_sizes_is_divided_as_integers_are(
    operator: str, settings: dict[str, Any], divisor: int, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["size"], start=2, end=3),
        helper.make_node("Sub", ["twenty", "size"], ["difference"]),
        helper.make_node(operator, ["difference", "divisor"], ["quotient"], **settings),
        helper.make_node("Cast", ["quotient"], ["number"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "number"], ["y"]),
    ]
    held: dict[str, Any] = {"twenty": [20], "divisor": [divisor]}
    path = _file(tmp_path / "a.onnx", ["batch", 3, "length"], nodes, **held)
    _imported(path, *[torch.zeros(2, 3, length) for length in (16, 19, 20, 21, 22, 25)])
    _imported(_file(tmp_path / "a.onnx", ["batch", 3, 22], nodes, **held), torch.zeros(3, 3, 22))


def test_a_size_times_a_number_may_be_infinite_without_a_word(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "one"], ["size"]),
        helper.make_node("Cast", ["size"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "large"], ["product"]),
        helper.make_node("Min", ["x", "product"], ["y"]),
    ]
    path = _file(tmp_path / "large.onnx", ["batch", 4], nodes, one=np.int64(1), large=np.float32(3e38))
    _imported(path, torch.randn(3, 4))
