"""Files of penjing's own classifiers: run by ONNX Runtime as integers, equal to the calibrated graph."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.place import apply_quantization, products
from penjing.compress.graph.stored import stored
from penjing.compress.quantize.targets import TARGETS, GraphSettings, TargetName
from penjing.core.errors import InputError
from penjing.core.graph.network import Network
from penjing.core.models.resnet import ConvNorm
from penjing.core.models.resnet_config import ResNetConfig
from tests.compress.products import EXACT
from tests.compress.quantize.networks import (
    basic,
    bottleneck,
    images,
    integer_weights,
    network_of,
    quantized,
    random_resnet,
)


def exported(path: Path, config: ResNetConfig, target: TargetName, **settings: object) -> Network:
    network = quantized(random_resnet(config), images(config, 32), target=target, **settings)
    export_network(stored(network, target), path, {}, target)
    return network


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


_CASES = [(basic(), "onnxruntime-cpu"), *((bottleneck(), each) for each in TARGETS)]


@pytest.mark.parametrize(("config", "target"), _CASES)
@torch.no_grad()
def test_onnx_runtime_computes_what_was_calibrated(config: ResNetConfig, target: TargetName, tmp_path: Path) -> None:
    network = exported(tmp_path / "model.onnx", config, target)
    entries = TARGETS[target].session_options | ({} if target == "onnxruntime-avx2" else EXACT)
    for count in (1, 7):  # the batch is dynamic
        x = images(config, count, seed=5)
        expected = network(x)[0]
        for optimised in (None, tmp_path / "optimised.onnx"):
            y = run(tmp_path / "model.onnx", x, entries, optimised)
            assert y.shape == expected.shape
            # A value near a tie may round the other way; then one step of a later activation differs.
            assert (y - expected).abs().max() < 0.03 * expected.std()
    largest = max(int(weight.abs().max()) for weight in integer_weights(tmp_path / "model.onnx").values())
    assert largest == (63 if target == "onnxruntime-avx2" else 127)
    if target == "onnxruntime-avx2":  # 127 × 255 × 2 does not fit 16 bits, 63 × 255 × 2 does: no option is needed
        y = run(tmp_path / "model.onnx", x, {}, tmp_path / "optimised.onnx")
        assert (y - expected).abs().max() < 0.03 * expected.std()


@pytest.mark.parametrize("config", [basic(), bottleneck()], ids=["basic", "bottleneck"])
def test_onnx_runtime_fuses_everything_into_integer_kernels(config: ResNetConfig, tmp_path: Path) -> None:
    network = exported(tmp_path / "model.onnx", config, "onnxruntime-cpu")
    run(tmp_path / "model.onnx", images(config), {}, tmp_path / "optimised.onnx")
    kinds = Counter(node.op_type for node in onnx.load(str(tmp_path / "optimised.onnx")).graph.node)
    assert kinds["QLinearConv"] == len(list(products(network))) - 1
    assert kinds["QLinearAdd"] == len(random_resnet(config).blocks)
    assert kinds["QGemm"] == kinds["QLinearGlobalAveragePool"] == kinds["QuantizeLinear"] == 1
    assert not {"Conv", "Relu", "Add", "Gemm", "DequantizeLinear", "MaxPool"} & set(kinds)


def test_integers_are_those_of_the_weights_before_norms_were_folded(tmp_path: Path) -> None:
    """A norm multiplies whole channels, which have a scale each: it changes no integer but its sign."""
    files = {}
    model = random_resnet(bottleneck())
    for target in ("onnxruntime-cpu", "tensorrt"):
        exported(tmp_path / f"{target}.onnx", bottleneck(), target)
        files[target] = integer_weights(tmp_path / f"{target}.onnx")
        for name, found in files[target].items():
            layer = model.get_submodule(name)
            weight = (layer.conv.weight if isinstance(layer, ConvNorm) else layer.weight).detach()  # type: ignore[union-attr]
            scale = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.dim() - 1)) / 127  # type: ignore[operator]
            wanted = (weight / scale).round().to(torch.int8)
            same = (found == wanted) | (found == -wanted)
            assert same[2:].float().mean() > 0.999, name  # channels 0 and 1 are those that the norms switch off
            assert bool(((found.abs().int() - wanted.abs().int()).abs()[2:] <= 1).all()), name
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
    network = exported(tmp_path / "model.onnx", bottleneck(), "tensorrt", activations="fp8")
    x = images(bottleneck(), 4, seed=7)
    with torch.no_grad():
        expected = network(x)[0]
    # its optimiser breaks FP8 graphs (1.31: MaxPool is moved between the pair), so it is off
    y = run(tmp_path / "model.onnx", x, {})
    assert (y - expected).abs().max() < 0.1 * expected.std()


def test_what_is_not_calibrated_is_refused() -> None:
    network = apply_quantization(network_of(random_resnet(basic())), GraphSettings())
    with pytest.raises(InputError, match="range of images is unknown"):
        stored(network, "onnxruntime-cpu")
