"""Networks whose sizes stay open: at sizes that the example did not have they answer as ONNX Runtime does."""

from __future__ import annotations

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


def _file(path: Path, shape: list[int | str], nodes: list[onnx.NodeProto], opset: int = 18, **weights: Any) -> Path:
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
