"""Sensitivity of graphs: each group pruned, and each layer rounded, beside the whole network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from penjing.compress.graph.prepare import prepared
from penjing.compress.sensitivity.bits import round_rows
from penjing.compress.sensitivity.graphs import GraphBits, GraphPruning
from penjing.compress.sensitivity.kinds import TO_BITS, TO_PRUNING
from penjing.core import cli
from penjing.core.checkpoint.graph import load_network
from penjing.core.errors import InputError
from penjing.core.graph.network import tensor_at
from penjing.core.graph.trace import from_torch
from tests.compress.graph.networks import Branches, randomised
from tests.compress.graphs import write_graph

LAYERS = ["stem.0", "left.0", "right", "mixed.0", "shortcut", "last"]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graph")
    images = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    write_graph(folder / "net", from_torch(randomised(Branches()), (images,), meaning="classes"))
    np.savez(folder / "images.npz", images=np.random.default_rng(0).standard_normal((40, 3, 16, 16)).astype(np.float32))
    return folder / "net"


@torch.no_grad()
def test_cells_of_bits_equal_rounding_by_hand(graph: Path, tmp_path: Path) -> None:
    result = TO_BITS.measure(graph, GraphBits(widths=(8, 3)), out=tmp_path / "bits")
    assert [row["name"] for row in result["rows"]] == LAYERS
    assert (result["quality"], result["baseline"]["value"], result["baseline"]["samples"]) == ("similarity", 1.0, 6)
    network = prepared(load_network(graph))
    inputs = network.inputs()
    (whole,) = network(*inputs)
    weight = tensor_at(network.module, "mixed.0.weight")
    weight.copy_(round_rows(weight.flatten(1), 3).view_as(weight))
    (answer,) = network(*inputs)
    row = result["rows"][LAYERS.index("mixed.0")]
    assert row["size"] == weight.numel()
    eight, three = row["cells"]
    assert three["value"] == pytest.approx(float(cosine_similarity(whole, answer).mean()), abs=1e-6)
    error = (whole - answer).square().sum(1) / whole.square().sum(1)
    assert three["loss"] == pytest.approx(float(error.mean()), rel=1e-4)
    assert eight["loss"] < 0.01 * three["loss"]
    page = (tmp_path / "bits" / "sensitivity.html").read_text()
    assert all(text in page for text in ("shortcut", "6 samples", "squared error"))


@torch.no_grad()
def test_cells_of_pruning_equal_units_at_zero(graph: Path, tmp_path: Path) -> None:
    settings = GraphPruning(ratios=(0.5,), source=str(graph.parent / "images.npz"), images=16)
    result = TO_PRUNING.measure(graph, settings, out=tmp_path / "pruning")
    assert result["baseline"]["samples"] == 16
    rows = {row["name"]: row for row in result["rows"]}
    assert len(rows) >= 2
    for row in rows.values():
        (cell,) = row["cells"]
        assert cell["removed"] == row["size"] // 2
        assert cell["value"] < 1 - 1e-6 < result["baseline"]["value"] + 1e-6
        assert cell["loss"] > 0
    again = TO_PRUNING.measure(graph, settings, out=tmp_path / "pruning")
    assert again == json.loads((tmp_path / "pruning" / "sensitivity.json").read_text())


def test_other_samples_under_the_same_name_are_measured_anew(graph: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(1).standard_normal((40, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", images=images)
    settings = GraphBits(widths=(3,), source=str(tmp_path / "mine.npz"), images=8)
    first = TO_BITS.measure(graph, settings, out=tmp_path / "bits")
    np.savez(tmp_path / "mine.npz", images=images[::-1])
    with pytest.raises(InputError, match="files that they name"):
        TO_BITS.measure(graph, settings, out=tmp_path / "bits")
    again = TO_BITS.measure(graph, settings, out=tmp_path / "bits", force=True)
    assert again["rows"] != first["rows"]


def test_a_function_that_draws_is_called_once(graph: Path, tmp_path: Path) -> None:
    lines = [
        "import pathlib, numpy as np",
        "def drawn():",
        "    with open(pathlib.Path(__file__).with_name('calls'), 'a') as f:",
    ]
    lines += ["        f.write('x')", "    yield {'x': np.random.standard_normal((20, 3, 16, 16)).astype(np.float32)}"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    settings = GraphBits(widths=(3,), source=f"{tmp_path}/mine.py:drawn", images=8)
    assert TO_BITS.measure(graph, settings, out=tmp_path / "bits")["baseline"]["samples"] == 8
    assert (tmp_path / "calls").read_text() == "x"


def test_labels_that_are_no_classes_are_no_matter(graph: Path, tmp_path: Path) -> None:
    images = np.random.default_rng(1).standard_normal((20, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", images=images, labels=np.linspace(0, 1, 20))
    settings = GraphBits(widths=(3,), source=str(tmp_path / "mine.npz"), images=8)
    assert TO_BITS.measure(graph, settings, out=tmp_path / "bits")["rows"]


def test_the_command(graph: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = str(graph.parent / "images.npz"), tmp_path / "out"
    command = ["compress", "sensitivity", str(graph), "--source", source, "--data", "held-out", "--images", "4"]
    assert cli._run([*command, "--bits", "--widths", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr().err
    assert all(name in shown for name in LAYERS)
    assert "similarity of the whole network: 1.0000 on 4 samples" in shown


def test_samples_that_do_not_fit_leave_nothing(graph: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "small.npz", images=np.random.default_rng(0).standard_normal((20, 3, 8)).astype(np.float32))
    with pytest.raises(InputError, match="give what the network takes"):
        TO_BITS.measure(graph, GraphBits(source=str(tmp_path / "small.npz")), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
