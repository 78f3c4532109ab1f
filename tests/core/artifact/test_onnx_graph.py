"""Artifacts of graphs: opened, run, recorded, compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penjing.core.artifact.onnx import ONNX_RUNTIME
from penjing.core.artifact.onnx_graph import (
    QUANTITY,
    graph_differences,
    open_graph_artifact,
    open_graph_session,
    recorded_inputs,
    recorded_outputs,
    run_graph,
    tensors_to_record,
)
from penjing.core.artifact.parity import FAKE_QUANTIZED, Parity
from penjing.core.errors import InputError
from penjing.core.graph.config import GraphConfig, TensorSpec
from tests.core.artifact.graph_artifacts import LABELS, lengths_apart, two_inputs

BETWEEN = (FAKE_QUANTIZED, ONNX_RUNTIME)


def config_of(dtype: str = "float32", shape: tuple[int | str, ...] = ("batch", 3), **more: object) -> GraphConfig:
    one = TensorSpec(name="x", dtype="float32", shape=("batch", 2))
    return GraphConfig.model_validate(
        {"inputs": (one,), "outputs": (TensorSpec(name="y", dtype=dtype, shape=shape),), **more}
    )


@pytest.mark.parametrize("write", [two_inputs, lengths_apart])
def test_an_artifact_answers_as_its_record_says(write: object, tmp_path: Path) -> None:
    artifact = open_graph_artifact(write(tmp_path / "net"))  # type: ignore[operator]
    inputs = recorded_inputs(artifact.parity, artifact.config)
    assert [(name, value.dtype) for name, value in inputs.items()] == [
        (spec.name, np.dtype(spec.dtype)) for spec in artifact.config.inputs
    ]
    found = run_graph(artifact.session(1), artifact.config, inputs)
    known = recorded_outputs(artifact.parity, artifact.config, ONNX_RUNTIME)
    assert all(np.array_equal(found[name], value) and found[name].dtype == value.dtype for name, value in known.items())
    assert artifact.config.batched == (write is two_inputs)


def test_a_damaged_record_is_an_error_of_the_file(tmp_path: Path) -> None:
    parity = open_graph_artifact(two_inputs(tmp_path / "net")).parity
    config = open_graph_artifact(tmp_path / "net").config

    def damaged(name: str, **change: object) -> Parity:
        return parity.model_copy(update={"inputs": parity.inputs | {name: parity.inputs[name] | change}})

    bad = [
        damaged("x", dtype="object"),
        damaged("x", dtype="nothing"),
        damaged("x", shape=[8, 5]),
        damaged("choice", data="!"),
        parity.model_copy(update={"inputs": {}}),
    ]
    for each in bad:
        with pytest.raises(InputError, match=r"parity\.json: the inputs are damaged"):
            recorded_inputs(each, config)
    with pytest.raises(InputError, match="answers of nobody"):
        recorded_outputs(parity, config, "nobody")
    json.dumps(tensors_to_record({"any": np.zeros((0, 2), np.float16)}))


def test_a_folder_of_another_kind_and_a_type_that_numpy_lacks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no artifact of a graph"):
        open_graph_artifact(tmp_path)
    with pytest.raises(InputError, match="bfloat16"):
        open_graph_session(tmp_path / "model.onnx", config_of("bfloat16"))


def test_distances_are_in_units_of_the_spread_from_row_to_row() -> None:
    first = {"y": np.array([[0.0, 10.0, 1.0], [2.0, 14.0, 1.0]], np.float32)}
    second = {"y": first["y"] + np.array([[0.5, 0, 0], [0, 0, 0]], np.float32)}
    spread = np.sqrt((1 + 1 + 4 + 4) / 6)
    together, each, cosine = graph_differences(BETWEEN, first, second, config_of(meaning="classes", labels=LABELS))
    assert (together.quantity, each.quantity) == (QUANTITY, "output y")
    assert each.largest == together.largest == pytest.approx(0.5 / spread)
    assert each.mean == pytest.approx(0.5 / 6 / spread)
    assert together.same == 1.0
    one, other = first["y"][0], second["y"][0]
    expected = 1 - float(one @ other) / float(np.linalg.norm(one) * np.linalg.norm(other))
    assert (cosine.quantity, cosine.num_values) == ("cosine distance of y", 2)
    assert cosine.largest == pytest.approx(expected, rel=1e-4)


def test_the_worst_output_counts_and_classes_that_differ_are_seen() -> None:
    config = GraphConfig(
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 2)),),
        outputs=(
            TensorSpec(name="y", dtype="float32", shape=("batch", 3)),
            TensorSpec(name="mask", dtype="bool", shape=("batch", 2)),
        ),
        meaning="classes",
    )
    first = {"y": np.eye(3, dtype=np.float32)[:2], "mask": np.array([[True, False], [True, True]])}
    second = {"y": first["y"][:, ::-1], "mask": ~first["mask"]}
    together, *_, mask = graph_differences(BETWEEN, first, second, config)
    assert together.same == 0.5
    assert (mask.largest, mask.mean) == (1.0, 1.0)
    assert together.mean == 1.0
    assert together.num_values == 10


def test_what_is_constant_zero_or_infinite_is_compared_and_nan_is_refused() -> None:
    config = config_of()
    same = {"y": np.full((2, 3), 7, np.float32)}
    near = {"y": same["y"] + np.float32(7e-6)}
    assert graph_differences(BETWEEN, same, near, config)[0].largest < 2e-6
    for value in (0.0, -np.inf):
        filled = {"y": np.full((2, 3), value, np.float32)}
        assert [each.largest for each in graph_differences(BETWEEN, filled, filled, config)] == [0, 0, 0]
    for bad in (np.nan, np.inf):
        with pytest.raises(InputError, match="NaN or infinity in y"):
            graph_differences(BETWEEN, same, {"y": np.full((2, 3), bad, np.float32)}, config)
    with pytest.raises(InputError, match="shape"):
        graph_differences(BETWEEN, same, {"y": np.zeros((2, 4), np.float32)}, config)
