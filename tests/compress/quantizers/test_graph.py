"""Graphs as INT8 artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penjing.compress.exports import export_artifact
from penjing.compress.graph.place import products
from penjing.compress.parity.graph import GraphParity
from penjing.compress.quantizers.graph import GraphQuantize, _counts, quantize
from penjing.compress.samples.data import DataSettings
from penjing.core.artifact import onnx as onnx_artifact
from penjing.core.artifact.onnx import ONNX_RUNTIME
from penjing.core.artifact.onnx_graph import open_graph_artifact, run_graph
from penjing.core.artifact.parity import FAKE_QUANTIZED, FLOATING, DriftError
from penjing.core.checkpoint.graph import graph_skeleton, save_graph
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import Network
from penjing.core.graph.trace import from_torch
from penjing.core.progress import Silent
from penjing.core.work import Places
from tests.compress.graph.networks import Branches, randomised


@pytest.fixture
def places(tmp_path: Path) -> Places:
    images = torch.randn(12, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    found = Places(tmp_path / "net", tmp_path / "int8", tmp_path / "scratch")
    for folder in (found.source, found.partial, found.scratch):
        folder.mkdir()
    network = from_torch(randomised(Branches()), (images,), meaning="classes")
    save_graph(found.source, network, {"command": "test"})
    return found


def _quantize(places: Places, **settings: object) -> dict[str, object]:
    step = GraphQuantize.model_validate(settings)
    made = quantize(places, step, DataSettings(), places.source, Silent())
    (places.partial / "report.json").write_text("{}")
    return made["quantized"]


def test_an_artifact_runs_verifies_and_says_what_was_decided(places: Places) -> None:
    said = _quantize(places, keep=["right"], correct_bias=True)
    artifact = open_graph_artifact(places.partial)
    assert [spec.name for spec in artifact.config.inputs] == ["images"]
    images = np.random.default_rng(0).standard_normal((3, 3, 16, 16), np.float32)
    found = run_graph(artifact.session(1), artifact.config, {"images": images})
    assert found["output"].shape == (3, 6)
    assert artifact.parity.inputs["images"]["shape"] == [12, 3, 16, 16]
    assert GraphParity.rerun(places.partial, Silent()) == artifact.parity.differences
    assert [row["name"] for row in said["layers"] if row["format"] == "float32"] == ["right"]  # type: ignore[union-attr]
    assert 8 < said["effective_bits"] < 10  # type: ignore[operator]
    assert json.dumps(said)
    assert graph_skeleton(places.partial).config == artifact.config
    size = sum(path.stat().st_size for path in places.partial.iterdir() if path.name == "model.onnx")
    assert size < 0.75 * (places.source / "model.safetensors").stat().st_size


def test_an_artifact_is_exported_for_its_own_target(places: Places) -> None:
    _quantize(places)
    out = places.scratch / "net.onnx"
    record = export_artifact(places.partial, "onnx", out, force=False, progress=Silent())
    assert record.target == "onnxruntime-cpu"
    assert record.differences == open_graph_artifact(places.partial).parity.differences
    assert out.read_bytes() == (places.partial / "model.onnx").read_bytes()
    with pytest.raises(ConfigError, match=r"steps\.0\.target=tensorrt"):
        export_artifact(places.partial, "onnx", out, target="tensorrt", force=True, progress=Silent())


def test_what_onnx_runtime_answers_too_differently_is_refused(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_artifact, "has_vnni", lambda: True)  # or the hint would be about sums that saturate
    with pytest.raises(InputError, match=r"parity: onnxruntime differs.*raise parity_bound"):
        _quantize(places, parity_bound=1e-12, parity_share=0)


def test_what_answers_otherwise_but_no_worse_is_held_to_the_floating_network(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = _quantize(places, parity_bound=1e-12)
    between = (FLOATING, ONNX_RUNTIME)
    found = {each["between"]: each["mean"] for each in reversed(said["differences"])}  # type: ignore[call-overload]
    assert said["bound"]["between"] == between  # type: ignore[index]
    assert said["bound"]["value"] == pytest.approx(1.1 * found[FLOATING, FAKE_QUANTIZED])  # type: ignore[index]
    parity = open_graph_artifact(places.partial).parity
    assert FLOATING in parity.outputs
    again = GraphParity.rerun(places.partial, Silent())
    assert next(each.mean for each in again if each.between == between) == found[between]

    run = GraphParity.run

    def worse(self: GraphParity, *rest: Any) -> dict[str, Any]:
        answers = run(self, *rest)
        return {name: value + 0.2 * value.std() * (-1) ** np.arange(value.shape[-1]) for name, value in answers.items()}

    monkeypatch.setattr(GraphParity, "run", worse)
    with pytest.raises(InputError, match="onnxruntime differs from floating"):
        GraphParity.rerun(places.partial, Silent())
    with pytest.raises(InputError, match=r"onnxruntime differs from fake_quantized .* bound is 1e-12"):
        _quantize(places, parity_bound=1e-12, fall_back=0)


def test_a_share_of_the_layers_is_what_it_says() -> None:
    assert _counts(100, 0.29) == [4, 8, 15, 29]  # 0.29 · 100 is 28.999999999999996 in floating point
    assert _counts(7, 0.25) == [1]
    assert _counts(3, 0.25) == []


def test_the_first_layers_stay_floating_where_onnx_runtime_drifts_otherwise(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []
    measure = GraphParity.measure_network

    def drifts(self: GraphParity, network: Network, *rest: Any) -> Any:
        rounded = [each.name for each in products(network) if each.rounding is not None]
        tried.append(rounded)
        if len(rounded) > len(tried[0]) - 2:
            raise DriftError("parity: onnxruntime differs")
        return measure(self, network, *rest)

    monkeypatch.setattr(GraphParity, "measure_network", drifts)
    with pytest.raises(DriftError):
        _quantize(places, fall_back=0)
    assert len(tried) == 1
    tried.clear()
    said = _quantize(places, fall_back=0.5)
    assert said["kept_for_parity"] == tried[0][:2]
    assert [row["name"] for row in said["layers"] if row["format"] == "float32"] == tried[0][:2]  # type: ignore[union-attr]
    assert len(tried[-1]) == len(tried[0]) - 2
    assert GraphParity.rerun(places.partial, Silent()) == open_graph_artifact(places.partial).parity.differences
