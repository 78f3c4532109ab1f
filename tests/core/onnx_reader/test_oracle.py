"""How near an imported file must be to its original: 1e-5 of each output's scale, and no more than that by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from penjing.core.errors import InputError
from penjing.core.graph.compare import CLOSE, judged
from penjing.core.onnx_reader import module
from penjing.core.onnx_reader.oracle import Oracle
from penjing.core.onnx_reader.read import from_onnx
from penjing.core.onnx_reader.values import Call
from tests.core.onnx_reader.cases import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch 2.13 of its own code
EVALUATOR = "onnx's own evaluator, both in float64"


def _file(path: Path, nodes: list[onnx.NodeProto], dtype: Any = np.float32, **weights: np.ndarray) -> Path:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", kind, ["batch", 8])],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(np.asarray(value, dtype), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def _layer(activation: str, *more: str) -> list[onnx.NodeProto]:
    made = helper.make_node(activation, ["z", *more], ["y"], name="last")
    return [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["z"]), made]


def _weights(bias: float = 0.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.standard_normal((8, 4)) / 8, "b": np.full(4, bias)}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes Tanh wrong by a share."""

    def spoil(share: float) -> None:
        def compute(call: Call) -> torch.Tensor:
            return torch.tanh(call.tensor(0)) * (1 + share)

        monkeypatch.setitem(module.OPERATORS, "Tanh", compute)

    return spoil


def test_a_sigmoid_that_saturates_is_compared_where_rounding_is_gone(tmp_path: Path) -> None:
    """ONNX Runtime's sigmoid errs by 1e-8, which is more than 1e-5 of answers of 3e-4."""
    parity = from_onnx(_file(tmp_path / "a.onnx", _layer("Sigmoid"), **_weights(-9.0))).parity
    assert parity["oracle"] == EVALUATOR
    assert parity["distance"] < 1e-12
    assert parity["bound"] == CLOSE
    assert parity["before"][0]["distance"] > CLOSE
    assert parity["before"][0]["oracle"].startswith("onnxruntime ")
    assert "tolerance" not in parity


@pytest.mark.parametrize("bias", [0.0, -9.0])
def test_what_is_wrong_by_little_is_refused_with_the_way_to_accept_it(
    bias: float, wrong: Callable[[float], None], tmp_path: Path
) -> None:
    wrong(4e-5)
    path = _file(tmp_path / "a.onnx", _layer("Tanh"), **_weights(bias))
    with pytest.raises(InputError) as caught:
        from_onnx(path)
    said = str(caught.value)
    assert said.count("4.0e-05 of the output's scale") == 2  # of ONNX Runtime, and of the evaluator
    assert "at most 1e-05 is accepted" in said
    assert "Tanh last" in said
    assert "--tolerance 4.4e-05" in said
    with pytest.raises(InputError, match="at most 1e-05"):
        from_onnx(path, tolerance=3e-5)
    parity = from_onnx(path, tolerance=4.4e-5).parity
    assert (parity["bound"], parity["tolerance"]) == (CLOSE, 4.4e-5)
    assert parity["distance"] == pytest.approx(4e-5, rel=1e-2)


def test_layers_that_cancel_each_other_are_no_reason_for_a_wider_bound(
    wrong: Callable[[float], None], tmp_path: Path
) -> None:
    """x·A·B, where A·B is nearly one: the rounding of float32 is 1e-4 of the answer, a wrong operator is found."""
    rng = np.random.default_rng(1)
    left = rng.standard_normal((8, 64)) * 300
    right = np.linalg.pinv(left.astype(np.float32).astype(np.float64)).astype(np.float32).astype(np.float64)
    names = [("MatMul", ["x", "a"], "h"), ("MatMul", ["h", "b"], "z"), ("Sub", ["z", "x"], "d"), ("Tanh", ["d"], "y")]
    nodes = [helper.make_node(kind, reads, [made], name=made) for kind, reads, made in names]
    path = _file(tmp_path / "a.onnx", nodes, a=left, b=right)
    parity = from_onnx(path).parity
    assert parity["before"][0]["distance"] > CLOSE
    assert parity["distance"] < 1e-7
    wrong(1e-4)
    with pytest.raises(InputError, match="--tolerance"):
        from_onnx(path)


def test_a_file_of_16_bits_is_held_to_the_same_bound(wrong: Callable[[float], None], tmp_path: Path) -> None:
    path = _file(tmp_path / "a.onnx", _layer("Tanh"), np.float16, **_weights())
    found = from_onnx(path)
    assert found.network.config.inputs[0].dtype == "float16"
    assert found.network(*found.network.inputs())[0].dtype is torch.float16
    assert found.parity["oracle"].endswith("both in float32") or not found.parity["before"]
    assert found.parity["distance"] < CLOSE
    wrong(1e-4)  # less than half of what one rounding to 16 bits does
    with pytest.raises(InputError, match="both in float32"):
        from_onnx(path)


def test_casts_and_constants_of_16_bits_are_widened_too(tmp_path: Path) -> None:
    half = helper.make_tensor("v", TensorProto.FLOAT16, [1], [0.1])
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT16),
        helper.make_node("Shape", ["c"], ["s"]),
        helper.make_node("ConstantOfShape", ["s"], ["f"], value=half),
        helper.make_node("Constant", [], ["k"], value=half),
        helper.make_node("Mul", ["c", "k"], ["m"]),
        helper.make_node("Add", ["m", "f"], ["a"]),
        helper.make_node("Softmax", ["a"], ["p"]),
        helper.make_node("Cast", ["p"], ["y"], to=TensorProto.FLOAT),
    ]
    parity = from_onnx(_file(tmp_path / "a.onnx", nodes)).parity
    assert parity["distance"] < CLOSE


def test_the_evaluator_in_64_bits_answers_as_onnx_runtime_does(tmp_path: Path) -> None:
    """Of the operators that networks of today have; some of old versions it computes otherwise or not at all."""
    known = ("Conv", "BatchNormalization", "Gemm", "LSTM", "LayerNormalization", "AveragePool", "Resize", "Softmax")
    cases = [case for case in CASES if case.operator in known and not (case.operator == "Softmax" and case.opset < 13)]
    for case in cases:
        path = tmp_path / "a.onnx"
        path.write_bytes(case.model().SerializeToString())
        oracle = Oracle(path)
        inputs = {f"x{place}": torch.from_numpy(np.array(value)) for place, value in enumerate(case.inputs)}
        if case.operator == "Resize" and case.opset < 11:
            with pytest.raises(InputError, match="onnx's evaluator cannot compute it in float64"):
                oracle.answers_in_float64(inputs)
            continue
        for one, other in zip(oracle.answers_in_float64(inputs), oracle.answers(inputs), strict=True):
            torch.testing.assert_close(one, other.double(), rtol=1e-5, atol=1e-5)
            assert one.dtype is torch.float64


def test_what_is_no_number_is_accepted_by_no_tolerance() -> None:
    with pytest.raises(InputError, match="inf of the output's scale"):
        judged("a.onnx", [("the original", lambda: float("inf")), ("another", lambda: 0.0)], tolerance=1.0)


def test_a_measure_that_cannot_be_made_is_said() -> None:
    def impossible() -> float:
        raise InputError("there is no such operator in 64 bits")

    with pytest.raises(InputError, match=r"2\.0e-05 .* the original; at most 1e-05 .*no such operator in 64 bits"):
        judged("a.onnx", [("the original", lambda: 2e-5), ("another", impossible)], tolerance=None)


def test_why_onnx_runtime_does_not_load_a_file_is_said_first(tmp_path: Path) -> None:
    path = _file(tmp_path / "a.onnx", _layer("Tanh"), **_weights())
    model = onnx.load(path)
    model.ir_version = 99
    onnx.save(model, path)
    with pytest.raises(InputError, match=r"cannot load it: .* failed: Unsupported model IR version: 99"):
        Oracle(path)
