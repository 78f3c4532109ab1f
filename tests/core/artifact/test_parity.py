"""The parity record: written by compression, completed by whoever serves the artifact, and held to its bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penjing.core.artifact import onnx
from penjing.core.artifact.base import is_artifact
from penjing.core.artifact.onnx import ONNX_RUNTIME, ONNX_RUNTIME_FLOAT, gate_onnx, recorded
from penjing.core.artifact.parity import (
    FAKE_QUANTIZED,
    SERVED,
    Bound,
    Difference,
    DriftError,
    Parity,
    add_answers,
    gate,
    is_within,
    measured,
    read_parity,
    write_parity,
)
from penjing.core.errors import InputError
from penjing.core.manifest import write_manifest

BOUND = Bound(between=(FAKE_QUANTIZED, ONNX_RUNTIME), quantity="logits", statistic="largest", value=0.1)


def differ(name: str, largest: float) -> Difference:
    return measured((FAKE_QUANTIZED, name), "logits", 10, largest, 0.0, 1.0)


def record() -> Parity:
    outputs = {ONNX_RUNTIME: [[1.0, 2.0]]}
    return Parity(
        family="classifier", inputs={}, outputs=outputs, differences=(differ(ONNX_RUNTIME, 0.0),), bound=BOUND
    )


def test_a_record_reads_back_as_written_and_takes_answers_beside_it(tmp_path: Path) -> None:
    write_parity(tmp_path, record())
    hashed = (tmp_path / "parity.json").read_bytes()
    assert read_parity(tmp_path) == record()
    add_answers(tmp_path, SERVED, [[9.0, 9.0]], (differ(SERVED, 0.5),))
    add_answers(tmp_path, SERVED, [[1.0, 2.5]], (differ(SERVED, 0.25),))  # replaces
    assert (tmp_path / "parity.json").read_bytes() == hashed
    parity = read_parity(tmp_path)
    assert recorded(parity, SERVED).tolist() == [[1.0, 2.5]]
    assert [each.largest for each in parity.differences] == [0.0, 0.25]


def test_the_gate_holds_one_statistic_of_one_quantity() -> None:
    gate((differ(ONNX_RUNTIME_FLOAT, 5.0), differ(ONNX_RUNTIME, 0.1)), BOUND, "hint")
    with pytest.raises(
        InputError,
        match=r"^parity: onnxruntime differs from fake_quantized by 0\.5 \(logits, largest\), the bound is 0\.1; hint$",
    ):
        gate((differ(ONNX_RUNTIME, 0.5),), BOUND, "hint")
    with pytest.raises(InputError, match="logits of served_endpoint against fake_quantized were not measured; hint"):
        gate((differ(ONNX_RUNTIME, 0.0),), BOUND.of(SERVED), "hint")
    assert not is_within((differ(ONNX_RUNTIME, 0.0),), BOUND.of(SERVED))


def test_a_processor_that_saturates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx, "has_vnni", lambda: False)
    with pytest.raises(InputError, match=r"16-bit sums saturate.*onnxruntime-avx2"):
        gate_onnx((differ(ONNX_RUNTIME, 0.5), differ(ONNX_RUNTIME_FLOAT, 0.01)), BOUND, "hint")
    monkeypatch.setattr(onnx, "has_vnni", lambda: True)
    with pytest.raises(DriftError, match=r"; hint$"):  # its sums are exact
        gate_onnx((differ(ONNX_RUNTIME, 0.5), differ(ONNX_RUNTIME_FLOAT, 0.01)), BOUND, "hint")
    with pytest.raises(InputError, match="hint"):
        gate_onnx((differ(ONNX_RUNTIME, 0.5), differ(ONNX_RUNTIME_FLOAT, 0.5)), BOUND, "hint")
    gate_onnx((differ(ONNX_RUNTIME, 0.05), differ(ONNX_RUNTIME_FLOAT, 0.5)), BOUND, "hint")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_no_difference(value: float) -> None:
    with pytest.raises(InputError, match="fake_quantized or onnxruntime computes NaN or infinity"):
        differ(ONNX_RUNTIME, value)


def test_another_schema_and_damage_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    path.write_text(json.dumps({"schema_version": 1, "inputs": [], "outputs": {}, "differences": []}))
    with pytest.raises(InputError, match=r"parity\.json has schema_version 1, this penjing reads 2; compress"):
        read_parity(tmp_path)
    path.write_text(json.dumps(record().model_dump(mode="json") | {"inputs": []}))
    with pytest.raises(InputError, match=r"parity\.json: inputs: .*the file is damaged: compress the model again"):
        read_parity(tmp_path)


@pytest.mark.parametrize("outputs", [{}, {ONNX_RUNTIME: 3}, {ONNX_RUNTIME: [["a"]]}, {ONNX_RUNTIME: [1.0]}])
def test_answers_that_are_no_table_are_refused(outputs: dict[str, object]) -> None:
    with pytest.raises(InputError, match="compress the model again"):
        recorded(record().model_copy(update={"outputs": outputs}), ONNX_RUNTIME)


def test_the_manifest_says_whether_a_folder_is_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert not is_artifact(tmp_path)
    write_manifest(tmp_path, "checkpoint", {})
    assert not is_artifact(tmp_path)
    write_manifest(tmp_path, "artifact", {})
    assert is_artifact(tmp_path)
