"""Exported files: valid, run by ONNX Runtime as integers, equal to the fake-quantized network but for roundings."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from penjing.compress.export.onnx_classifier import export_onnx, integer_weights
from penjing.compress.quantize.place_resnet import apply_quantization, calibrate, layers
from penjing.compress.quantize.targets import TARGETS, ClassifierSettings, TargetName
from penjing.core.errors import InputError
from penjing.core.models.resnet import ResNet
from penjing.core.models.resnet_config import ResNetConfig
from tests.compress.quantize.networks import basic, bottleneck, images, random_resnet


def exported(
    path: Path, config: ResNetConfig, target: TargetName, settings: ClassifierSettings | None = None
) -> ResNet:
    model = apply_quantization(random_resnet(config), target, settings)
    calibrate(model, [(images(config, 32),)])
    export_onnx(model, tuple(images(config).shape[2:]), target, path)  # type: ignore[arg-type]
    return model.eval()


def run(path: Path, x: torch.Tensor, entries: dict[str, str], optimised: Path | None = None) -> torch.Tensor:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    if optimised is not None:
        options.optimized_model_filepath = str(optimised)
    else:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(None, {"images": x.numpy()})[0]))


@pytest.mark.parametrize("config", [basic(), bottleneck()], ids=["basic", "bottleneck"])
@pytest.mark.parametrize("target", TARGETS)
@torch.no_grad()
def test_onnx_runtime_computes_what_was_fake_quantized(
    config: ResNetConfig, target: TargetName, tmp_path: Path
) -> None:
    model = exported(tmp_path / "model.onnx", config, target)
    for count in (1, 7):  # the batch is dynamic
        x = images(config, count, seed=5)
        expected = model(x)
        for optimised in (None, tmp_path / "optimised.onnx"):
            y = run(tmp_path / "model.onnx", x, TARGETS[target].session_options, optimised)
            assert y.shape == expected.shape
            # A value near a tie may round the other way; then one step of a later activation differs.
            assert (y - expected).abs().max() < 0.03 * expected.std()


@pytest.mark.parametrize("config", [basic(), bottleneck()], ids=["basic", "bottleneck"])
def test_onnx_runtime_fuses_everything_into_integer_kernels(config: ResNetConfig, tmp_path: Path) -> None:
    model = exported(tmp_path / "model.onnx", config, "onnxruntime-cpu")
    run(tmp_path / "model.onnx", images(config), {}, tmp_path / "optimised.onnx")
    kinds = Counter(node.op_type for node in onnx.load(str(tmp_path / "optimised.onnx")).graph.node)
    assert kinds["QLinearConv"] == len(list(layers(model))) - 1
    assert kinds["QLinearAdd"] == len(model.blocks)
    assert kinds["QGemm"] == kinds["QLinearGlobalAveragePool"] == kinds["QuantizeLinear"] == 1
    assert not {"Conv", "Relu", "Add", "Gemm", "DequantizeLinear", "MaxPool"} & set(kinds)


def test_reduced_weights_need_no_session_option(tmp_path: Path) -> None:
    """127 × 255 × 2 does not fit 16 bits, 63 × 255 × 2 does: what x64 without VNNI adds up."""
    model = exported(tmp_path / "model.onnx", bottleneck(), "onnxruntime-avx2")
    assert max(int(weight.abs().max()) for weight in integer_weights(tmp_path / "model.onnx").values()) == 63
    x = images(bottleneck(), 8, seed=6)
    with torch.no_grad():
        expected = model(x)
    y = run(tmp_path / "model.onnx", x, {}, tmp_path / "optimised.onnx")
    assert (y - expected).abs().max() < 0.03 * expected.std()


def test_integers_are_the_same_in_every_export(tmp_path: Path) -> None:
    files = {}
    for target in ("onnxruntime-cpu", "tensorrt"):
        model = exported(tmp_path / f"{target}.onnx", bottleneck(), target)
        files[target] = integer_weights(tmp_path / f"{target}.onnx")
        for name, layer in layers(model):
            if layer.weight_quantizer is not None:
                weight = layer.weight if name == "fc" else layer.conv.weight  # type: ignore[union-attr]
                trained, _ = layer.weight_quantizer.integers(weight)  # type: ignore[arg-type]
                stored = files[target][name]
                same = (stored == trained) | (stored == -trained)  # a negative factor of the norm turns the sign
                assert bool(same[2:].all()), name  # channels 0 and 1 are those that the norms switch off
    assert files["tensorrt"].keys() <= files["onnxruntime-cpu"].keys()
    for name, weight in files["tensorrt"].items():
        assert torch.equal(weight[2:], files["onnxruntime-cpu"][name][2:]), name


def test_weights_are_stored_as_int8_and_tensorrt_gets_its_form(tmp_path: Path) -> None:
    config = bottleneck()
    exported(tmp_path / "model.onnx", config, "tensorrt")
    model = onnx.load(str(tmp_path / "model.onnx"))
    makers = {output: node for node in model.graph.node for output in node.output}
    constants = {constant.name: numpy_helper.to_array(constant) for constant in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            zero = constants[node.input[2]]
            assert zero.dtype == np.int8
            assert not zero.any()
        if node.op_type == "Add":
            kinds = sorted(makers[name].op_type for name in node.input)
            assert kinds == ["Conv", "DequantizeLinear"], node.name
        if node.op_type == "Conv" and makers.get(node.input[1]) is not None:
            assert node.input[2] in constants  # the bias stays floating
            assert constants[makers[node.input[1]].input[0]].dtype == np.int8
    assert model.opset_import[0].version == 21
    weights = sum(array.nbytes for name, array in constants.items() if name.endswith(".weight"))
    assert (tmp_path / "model.onnx").stat().st_size < weights + 30_000


def test_fp8_is_written_and_simulated_by_onnx_runtime(tmp_path: Path) -> None:
    model = exported(tmp_path / "model.onnx", bottleneck(), "tensorrt", ClassifierSettings(activations="fp8"))
    x = images(bottleneck(), 4, seed=7)
    with torch.no_grad():
        expected = model(x)
    # its optimiser breaks FP8 graphs (1.31: MaxPool is moved between the pair), so it is off
    y = run(tmp_path / "model.onnx", x, {})
    assert (y - expected).abs().max() < 0.1 * expected.std()


def test_a_floating_network_is_exported_too(tmp_path: Path) -> None:
    for config in (basic(), bottleneck()):
        model = random_resnet(config)
        export_onnx(model, tuple(images(config).shape[2:]), "onnxruntime-cpu", tmp_path / "f.onnx")  # type: ignore[arg-type]
        with torch.no_grad():
            expected = model(images(config))
        torch.testing.assert_close(run(tmp_path / "f.onnx", images(config), {}), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_calibrated_is_refused(tmp_path: Path) -> None:
    model = apply_quantization(random_resnet(basic()), "onnxruntime-cpu")
    with pytest.raises(InputError, match=r"range of stem\.input is unknown"):
        export_onnx(model, (12, 12), "onnxruntime-cpu", tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
