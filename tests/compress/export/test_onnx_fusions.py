"""Sums, norms and GELU that ONNX Runtime would fuse into slower operators stay apart, and answer the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from penjing.compress.export import onnx_graph
from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import calibrate_graph
from penjing.compress.graph.place import apply_quantization
from penjing.compress.graph.stored import stored
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.graph.trace import from_torch
from tests.compress.products import EXACT


class _Layer(nn.Module):
    """The half of a transformer's layer behind attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.first, self.last = nn.LayerNorm(8), nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x + y)
        return self.last(x + self.down(nn.functional.gelu(self.up(x)))) + x


def _kinds(path: Path, x: Tensor, y: Tensor) -> tuple[Tensor, Counter[str]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.optimized_model_filepath = 3, str(path.with_suffix(".optimised"))
    for key, value in EXACT.items():
        options.add_session_config_entry(key, value)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": x.numpy(), "y": y.numpy()})[0]
    run = onnx.load(options.optimized_model_filepath).graph.node
    return torch.from_numpy(np.asarray(found)), Counter(node.op_type for node in run)


@torch.no_grad()
def test_a_transformer_runs_in_parts_that_are_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, (x, y) = _Layer().eval(), torch.randn(2, 3, 5, 8)
    network = from_torch(model, (x, y), dynamic={"x": {0: "batch", 1: "length"}, "y": {0: "batch", 1: "length"}})
    x, y = torch.randn(2, 4, 7, 8)
    export_network(network, tmp_path / "a.onnx", {})
    found, kinds = _kinds(tmp_path / "a.onnx", x, y)
    torch.testing.assert_close(found, model(x, y), rtol=1e-5, atol=1e-5)
    assert not {"SkipLayerNormalization", "BiasGelu"} & set(kinds)
    assert (kinds["LayerNormalization"], kinds["Gelu"]) == (2, 1)
    monkeypatch.setattr(onnx_graph, "keep_apart", lambda graph, but: None)  # what would happen otherwise
    export_network(network, tmp_path / "b.onnx", {})
    found, kinds = _kinds(tmp_path / "b.onnx", x, y)
    torch.testing.assert_close(found, model(x, y), rtol=1e-5, atol=1e-5)
    assert {"SkipLayerNormalization", "BiasGelu"} <= set(kinds)


class _Ends(nn.Module):
    """A norm of a sum is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(x + y)


@torch.no_grad()
def test_an_output_keeps_its_axes(tmp_path: Path) -> None:
    model, (x, y) = _Ends().eval(), torch.randn(2, 3, 5, 8)
    export_network(from_torch(model, (x, y)), tmp_path / "a.onnx", {})
    found, _ = _kinds(tmp_path / "a.onnx", x, y)
    torch.testing.assert_close(found, model(x, y), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_product_of_integers_takes_its_bias_and_answers_as_between_pairs(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, (x, y) = _Layer().eval(), torch.randn(2, 3, 5, 8)
    network = from_torch(model, (x, y), dynamic={"x": {0: "batch", 1: "length"}, "y": {0: "batch", 1: "length"}})
    made = apply_quantization(network, GraphSettings())
    calibrate_graph(made, [(x, y)])
    kept = stored(made, "onnxruntime-cpu")
    export_network(kept, tmp_path / "pairs.onnx", {})
    export_network(kept, tmp_path / "integers.onnx", {}, "onnxruntime-cpu")
    wanted, pairs = _kinds(tmp_path / "pairs.onnx", x, y)
    found, integers = _kinds(tmp_path / "integers.onnx", x, y)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, made(x, y)[0], rtol=1e-4, atol=1e-4)
    assert pairs["MatMulIntegerToFloat"] == integers["MatMulIntegerToFloat"] == 2
    assert integers["Add"] == pairs["Add"] - 2
    assert not {"MatMul", "Gemm", "MatMulInteger", "SkipLayerNormalization", "BiasGelu"} & set(integers)
    for target in ("onnxruntime-cpu", "tensorrt"):
        export_network(kept, tmp_path / "a.onnx", {}, target)
        file = onnx.load(tmp_path / "a.onnx")
        assert {each.key: each.value for each in file.metadata_props}["penjing.target"] == target
        multiplied = [node.op_type for node in file.graph.node].count("MatMulInteger")
        assert multiplied == (2 if target == "onnxruntime-cpu" else 0)
