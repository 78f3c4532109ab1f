"""ONNX Runtime's times of what a search may make of a graph: the right layers are timed, and whole networks run."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from penjing.compress.families.base import family_at
from penjing.compress.graph.place import products
from penjing.compress.graph.prepare import prepared
from penjing.compress.recipe import load_recipe
from penjing.compress.search import latency, search
from penjing.compress.search.graph_clock import GraphClock, Single, _model
from penjing.compress.search.latency import BORDERS
from penjing.compress.search.recipe import Choices, Workload
from penjing.compress.search.search import run_joint_search
from penjing.compress.search.trial import Trials
from penjing.core.graph.network import tensor_at
from penjing.core.progress import Silent
from tests.compress.graphs import graph_folder
from tests.compress.prune_graph.traits import image
from tests.compress.search.test_search import SPACE, Two, write


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return graph_folder(tmp_path_factory.mktemp("clock") / "dense", Two(), image(12))


def opened(tmp_path: Path, network: Path) -> GraphClock:
    write(tmp_path, network)
    recipe = load_recipe(tmp_path / "base.toml")
    trials = Trials(recipe, Choices(widths=(1.0, 0.5)), family_at(recipe.model), Silent())
    return trials.clock(Workload(batch=3, rounds=3))


def test_layers_have_the_shapes_of_the_pruned_network(
    tmp_path: Path, network: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = opened(tmp_path, network)
    timed: list[Single] = []
    monkeypatch.setattr(clock, "_alone", lambda singles, *_: timed.extend(singles) or dict.fromkeys(singles, 1.0))
    parts, _ = clock.parts(3, Silent())
    for choice in ((1, 0, 0, 0, 0), (1, 1, 0, 0, 0)):
        made = prepared(clock._made(choice))
        weights = {tuple(tensor_at(made.module, str(each.weight.target)).shape) for each in products(made)}
        assert weights <= {single.weight for single in timed if single.bits == 32}
    first = next(single for single in timed if single.weight == (8, 3, 3, 3))
    assert first.inputs == (3, 3, 12, 12)
    assert (first.stride, first.padding, first.dilation) == ((1, 1), (0, 0), (1, 1))
    border = next(part for part in parts if BORDERS in part.kinds and {2, 3} <= {*part.scope})
    assert border.scope == (0, 2, 3)
    whole, half = border.kinds[BORDERS]
    assert whole.tolist() == [[0, 2400], [2400, 0]]  # 3 images of 8 channels of 10 × 10, then of 4
    assert half.tolist() == [[0, 1200], [1200, 0]]


def test_layers_alone_and_whole_networks_run(tmp_path: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = opened(tmp_path, network)
    for choice in ((0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 1, 0, 1, 0)):
        (answers,) = clock.network(choice)()  # type: ignore[misc]
        assert answers.shape == (3, 5)
        assert np.isfinite(answers).all()
    ticks = itertools.count()
    monkeypatch.setattr(GraphClock, "now", property(lambda _: lambda: float(next(ticks))))
    parts, table = clock.parts(3, Silent())
    assert {entry["seconds"] for entry in table["entries"]} == {0.0}  # a tick, less the tick of a call by itself
    assert len(parts) == 5  # three layers and two borders


def test_a_layer_of_8_bits_is_computed_on_integers(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    single = Single((1, 8, 6, 6), (16, 8, 3, 3), 1, (1, 1), (1, 1), (1, 1), 8)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "made.onnx")
    onnxruntime.InferenceSession(_model(single), options, providers=["CPUExecutionProvider"])
    assert b"QLinearConv" in (tmp_path / "made.onnx").read_bytes()


def test_a_graph_is_searched_by_latency(tmp_path: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(clock: GraphClock, singles: list[Single], *_: object) -> dict[Single, float]:
        return {each: 1e-9 * each.bits * np.prod(each.weight) for each in singles}

    def timed(clock: GraphClock, choice: tuple[int, ...], *_: object) -> dict[str, float]:
        return {"ratio": 1 - 0.05 * sum(choice), "start": 1e-3}

    monkeypatch.setattr(GraphClock, "_alone", alone)
    for module in (latency, search):
        monkeypatch.setattr(module, "time_network", timed)
    lines = {"space": SPACE.replace("0.75, ", ""), "cost": '"latency"', "workload": "{ rounds = 3 }"}
    result = run_joint_search(write(tmp_path, network, combinations="8", **lines))
    known = {"once", "of_its_time", "a_border"}
    assert result["latency"]["coefficients"].keys() == known
    assert result["whole"] > 0
    assert "The layers alone" in (tmp_path / "search/report.html").read_text()
