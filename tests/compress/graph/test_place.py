"""Placement, calibration and stored integers; ONNX Runtime is the oracle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import calibrate_graph, correct_graph_biases, graph_layer_errors
from penjing.compress.graph.place import apply_quantization, products
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.stored import folded, stored
from penjing.compress.quantize.targets import GraphSettings
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import Network, operator_name, tensor_at
from penjing.core.graph.trace import from_torch
from tests.compress.graph.networks import Block, Branches, randomised
from tests.compress.products import EXACT
from tests.core.graph.networks import Residual

_IMAGES = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(3))
_TOKENS = torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(3))


def _images(model: type = Branches) -> Network:
    return from_torch(randomised(model()), (_IMAGES[:2],))


def _tokens() -> Network:
    return from_torch(randomised(Block()), (_TOKENS,), dynamic={"x": {0: "batch", 1: "length"}})


def _run(network: Network, path: Path, *inputs: Tensor) -> tuple[Tensor, Counter[str]]:
    """What ONNX Runtime answers, and the operators that it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    for key, value in EXACT.items():
        options.add_session_config_entry(key, value)
    options.optimized_model_filepath = str(path.with_suffix(".optimised"))
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [spec.name for spec in network.config.inputs]
    found = session.run(None, dict(zip(names, (value.numpy() for value in inputs), strict=True)))[0]
    run = onnx.load(options.optimized_model_filepath).graph.node
    return torch.from_numpy(np.asarray(found)), Counter(node.op_type for node in run)


def _gap(one: Tensor, other: Tensor) -> float:
    """Mean difference in standard deviations of `one`."""
    return float((one - other).abs().mean() / one.std())


@torch.no_grad()
@pytest.mark.parametrize("model", [Branches, Residual, Block])
def test_what_is_prepared_answers_the_same_and_the_original_stays(model: type) -> None:
    network = _tokens() if model is Block else _images(model)
    before = network.text()
    inputs = (_TOKENS,) if network.config.inputs[0].name == "x" else (_IMAGES,)
    wanted = network(*inputs)[0]
    made = prepared(network)
    torch.testing.assert_close(made(*inputs)[0], wanted, rtol=1e-4, atol=1e-5)
    found = [operator_name(node) for node in made.module.graph.nodes]
    assert not {"batch_norm", "dropout", "scaled_dot_product_attention", "mean"} & set(found)
    assert network.text() == before
    torch.testing.assert_close(network(*inputs)[0], wanted, rtol=0, atol=0)


@torch.no_grad()
def test_convolutions_additions_and_pools_run_on_integers(tmp_path: Path) -> None:
    network = _images(Residual)
    made = apply_quantization(network, GraphSettings())
    calibrate_graph(made, [(_IMAGES,)])
    export_network(stored(made, "onnxruntime-cpu"), tmp_path / "a.onnx", {})
    answer, run = _run(network, tmp_path / "a.onnx", _IMAGES)
    assert not run.keys() & {"DequantizeLinear", "Conv", "Add", "GlobalAveragePool", "Gemm", "ReduceMean", "Relu"}
    assert run["QLinearConv"] == 2
    assert run["QGemm"] == run["QuantizeLinear"] == 1
    wanted = made(_IMAGES)[0]
    assert _gap(wanted, answer) < 0.005
    assert 0.001 < _gap(network(_IMAGES)[0], answer) < 0.05


class Padded(nn.Module):
    """Paddings of one side alone, as in networks that came from TensorFlow, before a pool and before convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=(1, 0))
        self.first = nn.Conv2d(16, 16, 3, stride=2, groups=16)
        self.second = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.last = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(nn.functional.pad(images, (2, 0)))
        x = nn.functional.pad(x, (0, 1, 0, 1), value=float("-inf"))
        x = nn.functional.max_pool2d(x, 3, 2)
        x = torch.relu(self.first(nn.functional.pad(x, (0, 1, 0, 1))))
        return self.last(self.second(nn.functional.pad(x, (1, 0, 2, 0))).mean((2, 3)))


@torch.no_grad()
@pytest.mark.parametrize("height", [16, 17])
def test_paddings_are_part_of_what_reads_them(height: int, tmp_path: Path) -> None:
    """Also where the last window of the padded image begins within its pixels or ends with them."""
    images = torch.randn(8, 3, height, 16, generator=torch.Generator().manual_seed(3))
    network = from_torch(randomised(Padded()), (images[:2],))
    torch.testing.assert_close(prepared(network)(images)[0], network(images)[0])
    made = apply_quantization(network, GraphSettings())
    calibrate_graph(made, [(images,)])
    export_network(stored(made, "onnxruntime-cpu"), tmp_path / "a.onnx", {}, "onnxruntime-cpu")
    answer, run = _run(network, tmp_path / "a.onnx", images)
    assert not run.keys() & {"Pad", "DequantizeLinear", "Conv", "MaxPool"}
    assert run["QLinearConv"] == 3
    assert run["Transpose"] <= 2
    assert _gap(made(images)[0], answer) < 0.005
    assert 0.001 < _gap(network(images)[0], answer) < 0.05


@torch.no_grad()
@pytest.mark.parametrize("target", ["onnxruntime-cpu", "onnxruntime-avx2", "tensorrt"])
def test_a_file_holds_the_integers_of_the_network_that_was_calibrated(tmp_path: Path, target: str) -> None:
    network = _images()
    settings = GraphSettings.model_validate({"target": target})
    made = apply_quantization(network, settings)
    calibrate_graph(made, [(_IMAGES,)])
    export_network(stored(made, settings.target), tmp_path / "a.onnx", {})
    kept = {each.name: onnx.numpy_helper.to_array(each) for each in onnx.load(tmp_path / "a.onnx").graph.initializer}
    rounded = [product for product in products(made) if product.rounding is not None]
    assert len(rounded) == (6 if target != "tensorrt" else 3)  # of which TensorRT gains nothing from the narrow ones
    for product in rounded:
        found = folded(made, product)
        np.testing.assert_array_equal(kept[f"{product.name}.weight"], found.weight.numpy())
        assert found.scale is not None
        np.testing.assert_array_equal(kept[f"{product.name}.weight_scale"], found.scale.numpy())
    largest = max(int(np.abs(kept[f"{product.name}.weight"].astype(int)).max()) for product in rounded)
    assert largest == (63 if target == "onnxruntime-avx2" else 127)
    answer, _ = _run(network, tmp_path / "a.onnx", _IMAGES)
    assert _gap(made(_IMAGES)[0], answer) < 0.01
    assert _gap(network(_IMAGES)[0], answer) < 0.1


def test_each_target_has_its_pairs() -> None:
    def rounded(network: Network, **settings: object) -> set[str]:
        made = apply_quantization(network, GraphSettings.model_validate(settings))
        found = made.module.graph.find_nodes(op="call_module")
        return {str(node.target).removeprefix("quantizers.") for node in found if "weight" not in str(node.target)}

    network = _images(Residual)
    names = [node.name for node in network.module.graph.nodes if operator_name(node) in ("relu", "conv2d")]
    first, second = names[1], names[2]
    assert {"images", first, second} <= rounded(network)
    shortcut = rounded(network, target="tensorrt")
    assert shortcut == {"images", first}  # the second convolution takes the addition into its kernel
    assert len(rounded(_tokens(), attention=True)) == len(rounded(_tokens())) + 4


def test_inputs_of_a_concatenation_share_their_quantizer_with_its_result() -> None:
    made = apply_quantization(_images(), GraphSettings())
    graph = made.module.graph
    joined = next(node for node in graph.nodes if operator_name(node) == "cat")
    before = {node.target for node in joined.args[0]}
    after = {user.target for user in joined.users}
    pooled = next(node for node in graph.nodes if operator_name(node) == "max_pool2d")
    assert len(before | after | {user.target for user in pooled.users}) == 1


@torch.no_grad()
def test_a_block_of_a_transformer_multiplies_integers(tmp_path: Path) -> None:
    network = _tokens()
    made = apply_quantization(network, GraphSettings(keep=("out",)))
    calibrate_graph(made, [(_TOKENS,)])
    assert {product.name: product.rounding is None for product in products(made)} == {
        "qkv": False,
        "out": True,
        "up": False,
        "down": False,
    }
    export_network(stored(made, "onnxruntime-cpu"), tmp_path / "a.onnx", {})
    tokens = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(4))
    answer, run = _run(network, tmp_path / "a.onnx", tokens)
    assert run["MatMulIntegerToFloat"] == 3
    assert _gap(made(tokens)[0], answer) < 0.005
    assert _gap(network(tokens)[0], answer) < 0.03


@torch.no_grad()
def test_corrected_biases_bring_the_means_back() -> None:
    network = _images()
    settings = GraphSettings(weights="int7", observer="percentile", percentile=0.98)
    made = apply_quantization(network, settings)
    calibrate_graph(made, [(_IMAGES,)])
    wanted = network(_IMAGES)[0].mean(0)
    before = (made(_IMAGES)[0].mean(0) - wanted).abs().max()
    correct_graph_biases(made, prepared(network), [(_IMAGES,)] * 2)
    assert (made(_IMAGES)[0].mean(0) - wanted).abs().max() < 0.2 * before


@torch.no_grad()
def test_errors_of_layers_are_those_of_their_own_rounding() -> None:
    made = apply_quantization(_images(), GraphSettings(keep=("last",)))
    calibrate_graph(made, [(_IMAGES,)])
    rows = {row["name"]: row for row in graph_layer_errors(made, [(_IMAGES,)])}
    assert rows["last"] == {"name": "last", "format": "float32", "weight": 0.0, "output": 0.0}
    assert all(0 < row["output"] < 0.05 for name, row in rows.items() if name != "last")
    first = next(iter(products(made)))
    assert first.before is not None
    assert first.before.mode == "on"


def test_a_quantized_graph_is_trained() -> None:
    network = _images()
    made = apply_quantization(network, GraphSettings(learn_weights=True))
    calibrate_graph(made, [(_IMAGES,)])
    made.module.train()
    made(_IMAGES)[0].square().mean().backward()
    without = [name for name, parameter in made.module.named_parameters() if parameter.grad is None]
    assert without == []
    assert any("growth" in name for name, _ in made.module.named_parameters())


def test_what_cannot_be_quantized_is_refused() -> None:
    network = _images(Residual)
    with pytest.raises(ConfigError, match=r"'head\*' matches no layer; there are first\.0, second\.0, last"):
        apply_quantization(network, GraphSettings(keep=("head*",)))
    with pytest.raises(InputError, match="keep leaves out all"):
        apply_quantization(network, GraphSettings(keep=("*",)))
    made = apply_quantization(network, GraphSettings())
    with pytest.raises(InputError, match="quantized already"):
        apply_quantization(made, GraphSettings())
    with pytest.raises(InputError, match="calibrate the network"):
        stored(made, "onnxruntime-cpu")
    with torch.no_grad():
        tensor_at(network.module, "last.weight")[0, 0] = torch.nan
    with pytest.raises(InputError, match=r"last\.weight holds NaN"):
        calibrate_graph(apply_quantization(network, GraphSettings()), [(_IMAGES,)])


class Named(nn.Module):
    """A weight that is not called one, and a node that is called as a method of modules: `to`."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(8, 3, 3, 3))
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(nn.functional.conv2d(x.to(torch.float32), self.kernel))
        return self.last(x.mean((2, 3)))


@torch.no_grad()
def test_names_of_weights_and_nodes_are_free(tmp_path: Path) -> None:
    network = from_torch(randomised(Named()), (_IMAGES[:4].double(),))
    assert "to" in [node.name for node in network.module.graph.nodes]
    quantized = apply_quantization(network, GraphSettings(target="onnxruntime-cpu"))
    calibrate_graph(quantized, [network.inputs()])
    export_network(stored(quantized, "onnxruntime-cpu"), tmp_path / "net.onnx", {})
    found, _ = _run(network, tmp_path / "net.onnx", *network.inputs())
    assert _gap(network(*network.inputs())[0], found) < 0.1


class Computed(nn.Module):
    """Biases that are made of weights, in front of a norm and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Conv2d(3, 8, 3, bias=False), nn.Parameter(torch.zeros(8))
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(nn.functional.conv2d(x, self.first.weight, self.shift.exp()))
        return nn.functional.linear(x.mean((2, 3)), self.last.weight, self.last.bias.exp())


@torch.no_grad()
def test_biases_that_are_computed_stay(tmp_path: Path) -> None:
    network = from_torch(randomised(Computed()), (_IMAGES[:4],))
    expected = network(*network.inputs())[0]
    torch.testing.assert_close(prepared(network)(*network.inputs())[0], expected)
    quantized = apply_quantization(network, GraphSettings(target="onnxruntime-cpu"))
    calibrate_graph(quantized, [network.inputs()])
    export_network(stored(quantized, "onnxruntime-cpu"), tmp_path / "net.onnx", {})
    found, _ = _run(network, tmp_path / "net.onnx", *network.inputs())
    assert _gap(expected, found) < 0.1


class _Embedded(nn.Module):
    """A table, a linear layer that reads its rows, and the table again as the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.middle = nn.Embedding(40, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.words(ids)
        return nn.functional.linear(rows + torch.relu(self.middle(rows)), self.words.weight)


@torch.no_grad()
def test_rows_of_a_table_are_stored_in_int8_and_looked_up_before_they_are_widened(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = _Embedded().eval()
    model.words.weight[3] *= 50  # rows have scales of their own
    network = from_torch(model, (torch.arange(8).view(2, 4),), dynamic={"ids": {0: "batch", 1: "length"}})
    ids = torch.arange(40).view(4, 10)
    made = apply_quantization(network, GraphSettings(embedding="int8"))
    calibrate_graph(made, [(ids,)])
    export_network(stored(made, "onnxruntime-cpu"), tmp_path / "a.onnx", {})
    graph = onnx.load(tmp_path / "a.onnx").graph
    kept = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
    assert not [name for name, value in kept.items() if value.dtype == np.float32 and value.size >= 16 * 16]
    steps = model.words.weight.abs().amax(1) / 127
    looked = {kept[node.input[0]].dtype.name for node in graph.node if node.op_type == "Gather"}
    assert looked == {"int8", "float32"}
    one_step = (torch.from_numpy(kept["words.weight"].astype(np.float32)) * steps[:, None] - model.words.weight).abs()
    assert bool((one_step <= 0.5001 * steps[:, None]).all())
    answer, _ = _run(network, tmp_path / "a.onnx", ids)
    assert _gap(made(ids)[0], answer) < 0.005
    assert 0.0005 < _gap(network(ids)[0], answer) < 0.03
    whole = apply_quantization(network, GraphSettings())
    assert not [node for node in whole.module.graph.find_nodes(op="call_module") if "rows" in str(node.target)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_layers_of_another_type_are_named(dtype: torch.dtype) -> None:
    network = from_torch(nn.Linear(8, 4).to(dtype), (torch.randn(2, 8).to(dtype),))
    with pytest.raises(InputError, match=rf"the layers of the network are {str(dtype)[6:]}.*--dtype float32"):
        apply_quantization(network, GraphSettings())
