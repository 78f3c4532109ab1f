"""`penjing export --to onnx` of a graph in floating point: ONNX Runtime gives the network's answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from penjing.compress.export import as_made
from penjing.compress.exports import export_artifact
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import Network
from penjing.core.progress import Silent
from tests.compress.graphs import graph_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    return graph_folder(tmp_path / "net", model, torch.randn(2, 6))


def test_a_graph_in_floating_point_becomes_a_file(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.onnx"
    record = export_artifact(folder, "onnx", out, force=False, progress=Silent())
    network = load_network(folder)
    x = torch.randn(5, 6)
    names = [spec.name for spec in network.config.inputs]
    (found,) = onnxruntime.InferenceSession(str(out)).run(None, {names[0]: x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(np.asarray(found), network(x)[0].numpy(), rtol=1e-4, atol=1e-5)
    (difference,) = record.differences
    assert difference.largest < 1e-5
    assert json.loads((tmp_path / "net.onnx.json").read_text())["artifact"] == "net"
    with pytest.raises(InputError, match="already exists"):
        export_artifact(folder, "onnx", out, force=False, progress=Silent())


class Odd(torch.nn.Module):
    """Answers an empty tensor, numbers that are none, infinity and what is true."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y[:, :0], torch.log(y * 0 - 1), torch.log(y * 0), y > 0


def test_outputs_that_are_empty_or_no_numbers_are_compared(tmp_path: Path) -> None:
    folder = graph_folder(tmp_path / "odd", Odd(), torch.randn(2, 6))
    record = export_artifact(folder, "onnx", tmp_path / "odd.onnx", force=False, progress=Silent())
    assert [(each.num_values, each.largest, each.mean) for each in record.differences] == [(8, 0, 0)] * 3
    assert (tmp_path / "odd.onnx").exists()


def test_a_file_that_answers_otherwise_is_not_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(network: Network, path: Path, about: dict[str, str]) -> int:
        changed = network.copy()
        next(changed.module.parameters()).data.mul_(1.1)
        return original(changed, path, about)

    original = as_made.export_network
    monkeypatch.setattr(as_made, "export_network", other)
    with pytest.raises(InputError, match="of its scale away in ONNX Runtime"):
        export_artifact(folder, "onnx", tmp_path / "net.onnx", force=False, progress=Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["net"]


def test_it_has_no_target(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is in floating point, which has one form; leave it out"):
        export_artifact(folder, "onnx", tmp_path / "a.onnx", target="onnxruntime-cpu", force=False, progress=Silent())
