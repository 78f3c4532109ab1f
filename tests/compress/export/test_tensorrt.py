"""A classifier's artifact for another target: the same integers and values, or a refusal that says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from penjing.compress.export import tensorrt_engine as engine
from penjing.compress.export.convert import _make_unsigned
from penjing.compress.export.tensorrt_rules import check_tensorrt
from penjing.compress.quantize.targets import TargetName
from penjing.compress.quantizers.classifier import ArtifactSettings, quantize_checkpoint
from penjing.core.artifact.onnx_classifier import normalised, open_classifier_artifact, recorded_images
from penjing.core.cli import _run
from penjing.core.errors import InputError, SetupError
from penjing.core.files import publish_folder
from penjing.core.runtime.onnx_runtime import check_external_data, open_session, run_session
from tests.compress.quantize.folders import image_data, vision_folder
from tests.compress.quantize.networks import integer_weights

pytestmark = pytest.mark.xdist_group("tensorrt-files")  # one artifact for all


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    source = vision_folder(root / "fp32", None)
    wanted: tuple[TargetName, ...] = ("tensorrt", "onnxruntime-cpu", "onnxruntime-avx2")
    for target in wanted:
        # The stem of one input channel, 9 values, stays floating for TensorRT.
        with publish_folder(root / target) as partial:
            quantize_checkpoint(source, partial, ArtifactSettings(target=target), image_data())
    return {target: root / target for target in wanted}


def export(artifact: Path, out: Path, *options: str) -> int:
    return _run(["export", str(artifact), str(out), "--to", "onnx", *options])


def logits(file: Path, artifact: Path, optimise: bool) -> np.ndarray:
    opened = open_classifier_artifact(artifact)
    images = normalised(recorded_images(opened.parity), opened.config)
    entries = {"session.x64quantprecision": "1"}
    return run_session(open_session(file, entries, threads=1, optimise=optimise), images)


def test_signed_becomes_unsigned_with_the_same_integers_and_values(
    artifacts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact, out = artifacts["tensorrt"], tmp_path / "ort.onnx"
    assert export(artifact, out, "--target", "onnxruntime-cpu") == 0
    assert "session.x64quantprecision" in capsys.readouterr().err
    before, after = integer_weights(artifact / "model.onnx"), integer_weights(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model = onnx.load(str(out))
    kinds = {constant.name: constant for constant in model.graph.initializer}
    zeros = [numpy_helper.to_array(kinds[n.input[2]]) for n in model.graph.node if n.op_type == "QuantizeLinear"]
    assert zeros
    assert all(zero.dtype == np.uint8 and zero == 128 for zero in zeros)
    assert sum(constant.data_type == TensorProto.INT32 for constant in model.graph.initializer) == len(before) > 4
    signed, unsigned = (logits(file, artifact, optimise=False) for file in (artifact / "model.onnx", out))
    assert np.median(np.abs(signed - unsigned)) < 1e-4 * signed.std()  # biases are rounded to a step of the accumulator
    assert np.abs(signed - unsigned).max() < 0.03 * signed.std()  # and may turn a tie
    model = onnx.load(str(artifact / "model.onnx"))
    _make_unsigned(model)
    onnx.save(model, str(tmp_path / "activations.onnx"))
    assert np.array_equal(logits(tmp_path / "activations.onnx", artifact, optimise=False), signed)
    record = json.loads((tmp_path / "ort.onnx.json").read_text())
    assert record["target"] == "onnxruntime-cpu"
    assert record["differences"][0]["largest"] < record["bound"]["value"]
    assert "additions run in floating point" in record["notes"][0]
    options = [logits(out, artifact, optimise=True), unsigned]
    assert np.abs(options[0] - options[1]).max() < 0.05 * unsigned.std()


def test_what_does_not_convert_exactly_is_refused(
    artifacts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, target, message in (
        ("onnxruntime-cpu", "tensorrt", "are unsigned, TensorRT's are signed"),
        ("onnxruntime-cpu", "onnxruntime-avx2", "integers beyond ±63"),
        ("tensorrt", "onnxruntime-avx2", "integers beyond ±63"),
    ):
        assert export(artifacts[source], tmp_path / "x.onnx", "--target", target) == 2
        assert message in capsys.readouterr().err
    assert _run(["export", str(artifacts["onnxruntime-cpu"]), str(tmp_path / "x.engine"), "--to", "tensorrt"]) == 2
    assert "are unsigned" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert export(artifacts["onnxruntime-avx2"], tmp_path / "y.onnx", "--target", "onnxruntime-cpu") == 0


def test_tensorrt_s_file_passes_its_rules_and_engines_need_a_gpu(
    artifacts: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = artifacts["tensorrt"]
    assert export(artifact, tmp_path / "trt.onnx", "--target", "tensorrt") == 0
    assert (tmp_path / "trt.onnx").read_bytes() == (artifact / "model.onnx").read_bytes()
    capsys.readouterr()
    if not torch.cuda.is_available():
        assert _run(["export", str(artifact), str(tmp_path / "m.engine"), "--to", "tensorrt"]) == 6
        error = capsys.readouterr().err
        assert "trtexec --onnx=model.onnx --stronglyTyped --minShapes=images:1x1x12x12" in error
        assert "--to onnx --target tensorrt" in error
        assert not (tmp_path / "m.engine").exists()
        with pytest.raises(SetupError, match="no CUDA GPU"):
            engine.check_machine(artifact, tmp_path / "m.engine", (1, 12, 12))


def _zero_point(model: onnx.ModelProto) -> None:
    name = next(node.input[2] for node in model.graph.node if node.op_type == "QuantizeLinear")
    _replace(model, name, np.array(3, np.int8))


def _unsigned(model: onnx.ModelProto) -> None:
    name = next(node.input[2] for node in model.graph.node if node.op_type == "QuantizeLinear")
    _replace(model, name, np.array(0, np.uint8))


def _computed_scale(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "QuantizeLinear")
    node.input[1] = "images"


def _axis(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.op_type == "DequantizeLinear" and attribute.name == "axis":
                attribute.i = 1


def _low(model: onnx.ModelProto) -> None:
    for constant in model.graph.initializer:
        if constant.name.endswith(".weight") and constant.data_type == TensorProto.INT8:
            weight = numpy_helper.to_array(constant).copy()
            weight.flat[0] = -128
            constant.CopyFrom(numpy_helper.from_array(weight, constant.name))


def _operator(model: onnx.ModelProto) -> None:
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "QLinearConv"


def _scale(model: onnx.ModelProto) -> None:
    name = next(node.input[1] for node in model.graph.node if node.op_type == "QuantizeLinear")
    _replace(model, name, np.array(-0.5, np.float32))


def _replace(model: onnx.ModelProto, name: str, value: np.ndarray) -> None:
    for constant in model.graph.initializer:
        if constant.name == name:
            constant.CopyFrom(numpy_helper.from_array(value, name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_zero_point, "zero point is not 0"),
        (_unsigned, "neither INT8 nor FP8"),
        (_computed_scale, "not a float32 constant"),
        (_axis, "axis 0"),
        (_low, "within ±127"),
        (_operator, "QLinearConv is not in the explicit form"),
        (_scale, "not positive"),
    ],
)
def test_each_rule_of_tensorrt_is_checked(change: Any, message: str, artifacts: dict[str, Path]) -> None:
    model = onnx.load(str(artifacts["tensorrt"] / "model.onnx"))
    check_tensorrt(model)
    change(model)
    with pytest.raises(InputError, match=message):
        check_tensorrt(model)


def test_the_engine_is_built_strongly_typed_with_a_range_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls alone: no TensorRT runs here."""
    calls: list[Any] = []
    parser = SimpleNamespace(parse=lambda model: model == b"good", num_errors=1, get_error=lambda index: "bad node")
    profile = SimpleNamespace(set_shape=lambda *shapes: calls.append(shapes))
    builder = SimpleNamespace(
        create_network=lambda flags: calls.append(flags),
        create_builder_config=lambda: SimpleNamespace(add_optimization_profile=lambda profile: calls.append("profile")),
        create_optimization_profile=lambda: profile,
        build_serialized_network=lambda network, config: b"plan",
    )
    fake = SimpleNamespace(
        __version__="10.0",
        Logger=type("Logger", (), {"ERROR": 1, "__init__": lambda self, level: None}),
        Builder=lambda logger: builder,
        OnnxParser=lambda network, logger: parser,
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
    )
    monkeypatch.setitem(sys.modules, "tensorrt", fake)  # type: ignore[arg-type]
    assert engine.build_engine(b"good", (1, 28, 28)) == b"plan"
    assert calls == [2, ("images", (1, 1, 28, 28), (8, 1, 28, 28), (64, 1, 28, 28)), "profile"]
    with pytest.raises(InputError, match=r"TensorRT 10\.0 does not parse the network: bad node"):
        engine.build_engine(b"else", (1, 28, 28))


@pytest.mark.parametrize(
    ("location", "length", "message"),
    [("../secret", 8, "outside its folder"), ("/etc/passwd", 8, "outside its folder"), ("gone", 8, "no file there"),
     ("short", 800, "ends before"), ("link", 8, "no file there")],
)  # fmt: skip
def test_constants_outside_the_folder_or_cut_off_are_refused(
    location: str, length: int, message: str, tmp_path: Path
) -> None:
    constant = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[length // 4], data_location=TensorProto.EXTERNAL
    )
    for key, value in (("location", location), ("length", str(length))):
        constant.external_data.add(key=key, value=value)
    node = helper.make_node("Identity", ["w"], ["logits"])
    output = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph([node], "g", [], [output], [constant]))
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(b"x" * 8)
    (folder / "short").write_bytes(b"x" * 8)
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=message):
        check_external_data(folder / "model.onnx")
    (folder / "model.onnx").write_bytes(model.SerializeToString()[:-5])
    with pytest.raises(InputError, match="it is not ONNX, or cut off"):
        check_external_data(folder / "model.onnx")
