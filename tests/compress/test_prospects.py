"""What `penjing graph` says of pruning and INT8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penjing.core.cli import app
from tests.compress.graph.networks import Branches
from tests.compress.graphs import graph_folder


class Sorted(nn.Module):
    """(batch, 8) → the same: nothing that could leave, nothing to round."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sort(-1)[0].exp()


def test_a_convolutional_network_is_told_what_can_leave_and_what_becomes_integers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = graph_folder(tmp_path / "net", Branches(), torch.randn(2, 3, 16, 16))
    files = ["--out", str(tmp_path / "net.txt"), "--json", str(tmp_path / "net.json")]
    app(["graph", str(folder), *files], standalone_mode=False)
    found = json.loads((tmp_path / "net.json").read_text())
    assert found["pruning"]["whole"] == {}
    # stem and depthwise branch leave together, the other branch, and what is added
    assert (found["pruning"]["groups"], found["pruning"]["units"]) == (3, 16 + 8 + 24)
    layers = ["stem.0", "left.0", "right", "mixed.0", "shortcut", "last"]
    assert (found["int8"]["layers"], found["int8"]["floating_layers"]) == (layers, [])
    operators = found["int8"]["operators"]
    assert operators["integer"]["conv2d"] == 5
    assert operators["integer"]["hardtanh"] == operators["integer"]["relu"] == 1  # kernels take them in
    assert operators["floating"]["silu"] == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "Pruning can take channels, heads or widths: 48 units in 3 groups." in said
    assert "INT8 for onnxruntime-cpu takes 6 of 6 convolutions and linear layers." in said


class Recurrent(nn.Module):
    """(batch, 4, 8) → (batch, 4, 3); its recurrent layer has three results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[0])


def test_an_operator_of_many_results_is_counted_once_by_its_name(tmp_path: Path) -> None:
    folder = graph_folder(tmp_path / "net", Recurrent(), torch.randn(2, 4, 8))
    files = ["--out", str(tmp_path / "net.txt"), "--json", str(tmp_path / "net.json")]
    app(["graph", str(folder), *files], standalone_mode=False)
    operators = json.loads((tmp_path / "net.json").read_text())["int8"]["operators"]
    assert operators["floating"]["lstm"] == 1
    assert "" not in operators["floating"]


def test_a_network_without_either_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = graph_folder(tmp_path / "net", Sorted(), torch.randn(2, 8))
    files = ["--out", str(tmp_path / "net.txt")]
    app(["graph", str(folder), *files, "--target", "tensorrt"], standalone_mode=False)
    said = " ".join(capsys.readouterr().err.split())
    assert "Pruning takes nothing: no channels, heads or widths can leave." in said
    assert "INT8 takes nothing: " in said
