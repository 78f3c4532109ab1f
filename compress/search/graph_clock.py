"""Seconds of a classifier or a graph in ONNX Runtime: of its layers one by one, and of whole networks.

Only shapes and bits matter for time, so that weights are made up. A layer of 8 bits is timed as it stands inside an
integer part of a network: integers come in, and of a convolution integers go out. What it takes to turn numbers into
integers and back where such parts end is left to the fit, as is all that is no layer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from glob import escape
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import Node

from penjing.compress.export.onnx_graph import export_network
from penjing.compress.graph.calibrate import prepare_graph
from penjing.compress.graph.place import Product, place_quantizers, products
from penjing.compress.graph.prepare import prepared
from penjing.compress.graph.ready import ready
from penjing.compress.graph.stored import stored
from penjing.compress.prune.budget import candidate
from penjing.compress.prune.subject import Subject
from penjing.compress.quantize.targets import GraphSettings
from penjing.compress.quantizers.onnx import quantization_for
from penjing.compress.samples.data import Samples
from penjing.compress.search.latency import BORDERS, LAYERS, Choice, TimedLayer, clock_of
from penjing.compress.search.recipe import STORED, Workload
from penjing.compress.search.space import Space, Weighted
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, operator_name, propagate
from penjing.core.progress import Progress
from penjing.core.runtime.onnx_runtime import open_graph
from penjing.core.runtime.timing import interleaved

OPSET = 21
TURN = 0.002  # seconds that a layer is called for in each round: one call is too short to be told from the clock


@dataclass(frozen=True)
class Single:
    """A convolution or a linear layer alone.

    Attributes:
        inputs: shape of what it reads. weight: its own, outputs first.
        stride, padding, dilation: of a convolution, one number an axis; empty of a linear layer.
    """

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    groups: int
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    bits: int


class GraphClock:
    """See `Clock`.

    Args:
        as_graph: a network as `subject` builds it → the same as a graph.
        traced: the whole network. settings: of the quantize step; None where nothing has 8 bits.
        samples: what ranges are found on; any do.
    """

    def __init__(
        self,
        subject: Subject,
        as_graph: Callable[[nn.Module], Network],
        traced: Network,
        space: Space,
        settings: GraphSettings | None,
        samples: Samples,
        workload: Workload,
    ) -> None:
        self.subject, self.as_graph, self.traced, self.space = subject, as_graph, traced, space
        self.settings, self.samples, self.workload = settings, samples, workload
        self._whole: Callable[[], object] | None = None
        self.threads = torch.get_num_threads()
        self.entries = {} if settings is None else quantization_for(settings.target, settings).session_options

    @property
    def now(self) -> Callable[[], float]:
        """See `Clock`."""
        return clock_of(self.threads)

    def parts(self, rounds: int, progress: Progress) -> tuple[list[TimedLayer], dict[str, Any]]:
        """See `Clock`."""
        network = prepared(self.traced)
        propagate(network, self._inputs(network))
        layers = {layer.name: layer for layer in self.space.layers if isinstance(layer, Weighted)}
        found: list[tuple[tuple[int, ...], dict[tuple[int, ...], Single]]] = []
        for product in products(network):
            layer = layers[product.name]
            sizes = [len(self.space.variables[each].options) for each in layer.scope]
            cases = {case: self._single(product, layer, case) for case in np.ndindex(*sizes)}
            found.append((layer.scope, cases))
        singles = list(dict.fromkeys(single for _, cases in found for single in cases.values()))
        seconds = self._alone(singles, rounds, progress)
        parts = []
        for scope, cases in found:
            taken = np.zeros([len(self.space.variables[each].options) for each in scope])
            for case, single in cases.items():
                taken[case] = seconds[single]
            parts.append(TimedLayer(scope, {LAYERS: taken}))
        parts += self._borders(network, layers)
        entries = [
            {"weight": "×".join(map(str, each.weight)), "bits": each.bits, "seconds": seconds[each]} for each in singles
        ]
        return parts, {"entries": entries, "threads": self.threads}

    @property
    def whole(self) -> Callable[[], object]:
        """See `Clock`."""
        if self._whole is None:
            self._whole = self.network(self.space.start)
        return self._whole

    def network(self, choice: Choice) -> Callable[[], object]:
        """See `Clock`."""
        network = self._made(choice)
        names = [each.name for each in network.config.inputs], [each.name for each in network.config.outputs]
        feed = {name: value.numpy() for name, value in zip(names[0], self._inputs(network), strict=True)}
        target = None
        if self.settings is not None and (len(self.space.floating(choice)) < self._quantizable):
            keep = (*self.settings.keep, *map(escape, self.space.floating(choice)))
            made, settings = ready(network, self.settings.model_copy(update={"keep": keep}), self.samples)
            network = place_quantizers(made.copy(), settings)
            prepare_graph(network, made, settings, self.samples)
            network.module.eval()
            network, target = stored(network, settings.target), settings.target
        with tempfile.TemporaryDirectory() as folder:
            export_network(network, path := Path(folder) / "model.onnx", {}, target)
            session = open_graph(path, self.entries, threads=self.threads, names=names)
        return partial(session.run, None, feed)

    @property
    def _quantizable(self) -> int:
        return sum(each.kind == "bits" for each in self.space.variables)

    def _made(self, choice: Choice) -> Network:
        """The network of a combination in floating point, its units gone."""
        selection = [
            (variable.group, list(variable.units[option]))
            for variable, option in zip(self.space.variables, choice, strict=True)
            if variable.group is not None and option
        ]
        module = candidate(self.subject, selection).to_empty(device="cpu").eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if not tensor.is_floating_point():
                    tensor.zero_()
                elif name.endswith("running_var"):
                    tensor.fill_(1.0)
                else:
                    tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
        return self.as_graph(module)

    def _inputs(self, network: Network) -> list[torch.Tensor]:
        """As many as the workload says, where the network takes any number."""
        found = network.inputs()
        if not network.config.batched:
            return list(found)
        return [each[:1].expand(self.workload.batch, *each.shape[1:]).contiguous() for each in found]

    def _single(self, product: Product, layer: Weighted, case: tuple[int, ...]) -> Single:
        at = dict(zip(layer.scope, case, strict=True))
        node = product.node
        read, whole = node.args[0], node.args[1]
        inputs, weight = (tuple(int(size) for size in each.meta["val"].shape) for each in (read, whole))  # type: ignore[union-attr]
        rows = weight[0] - round(weight[0] * sum(shares[at[each]] for each, shares in layer.rows.items()))
        columns = weight[1] - round(weight[1] * sum(shares[at[each]] for each, shares in layer.columns.items()))
        bits = 32 if layer.bits is None else int(self.space.variables[layer.bits].options[at[layer.bits]])
        if operator_name(node) == "linear":
            return Single((prod(inputs[:-1]), columns), (rows, columns), 1, (), (), (), bits)
        axes = len(weight) - 2
        values = [*node.args[3:], *[None] * 4][:4]
        stride, padding, dilation = (
            _each(value, default, axes, product.name) for value, default in zip(values, (1, 0, 1), strict=False)
        )
        groups = int(values[3] or 1)  # type: ignore[arg-type]
        if groups > 1:
            groups = groups * rows // weight[0]
        shape = (inputs[0], columns * groups, *inputs[2:])
        return Single(shape, (rows, columns, *weight[2:]), groups, stride, padding, dilation, bits)

    def _borders(self, network: Network, layers: Mapping[str, Weighted]) -> list[TimedLayer]:
        """For each layer and each of those whose results it reads: the numbers that it reads, where one of both has 8
        bits and the other has not."""
        owners = {product.node: layers[product.name] for product in products(network)}
        parts = []
        for node, layer in owners.items():
            read = node.args[0]
            assert isinstance(read, Node)
            for other in _made_by(read, owners):
                if layer.bits is None or other.bits is None or layer.bits == other.bits:
                    continue
                scope = tuple(sorted({layer.bits, other.bits, *layer.columns}))
                numbers = float(read.meta["val"].numel()) * layer.inputs_left(self.space.variables, scope)
                parts.append(TimedLayer(scope, {BORDERS: numbers * self._apart(layer.bits, other.bits, scope)}))
        return parts

    def _apart(self, one: int, other: int, scope: tuple[int, ...]) -> NDArray[np.bool_]:
        """Whether two layers differ in their bits, along the axes of their variables."""
        bits = [
            np.reshape(self.space.variables[number].options, [-1 if each == number else 1 for each in scope])
            for number in (one, other)
        ]
        return np.asarray(bits[0] != bits[1])

    def _alone(self, singles: Sequence[Single], rounds: int, progress: Progress) -> dict[Single, float]:
        """Median seconds of each, without what a call of the runtime takes by itself."""
        calls = [_call(_nothing(), np.zeros((1,), np.float32), self.threads)]
        for single in singles:
            kind = np.uint8 if single.bits == STORED else np.float32
            values = np.random.default_rng(0).integers(0, 255, single.inputs).astype(kind)
            calls.append(_call(_model(single), values, self.threads))
        progress.start("timing layers", rounds * len(calls))
        times = interleaved(calls, rounds=rounds, seconds=TURN, now=self.now, done=progress.advance)
        empty, *own = map(median, times)
        return {single: max(each - empty, 0.0) for single, each in zip(singles, own, strict=True)}


def _made_by(node: Node, owners: Mapping[Node, Weighted]) -> list[Weighted]:
    """The layers that made what `node` holds, through all that is no layer."""
    found, seen, left = list[Weighted](), set[Node](), [node]
    while left:
        each = left.pop()
        if each in seen:
            continue
        seen.add(each)
        if each in owners:
            found.append(owners[each])
        else:
            left += each.all_input_nodes
    return found


def _each(value: Any, default: int, axes: int, name: str) -> tuple[int, ...]:
    if value is None:
        return (default,) * axes
    if isinstance(value, int):
        return (value,) * axes
    if isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value):
        return tuple(value) * (axes if len(value) == 1 else 1)
    raise InputError(f"{name}: a convolution with {value!r} as stride or padding cannot be timed alone; take cost=macs")


def _call(model: bytes, values: np.ndarray[Any, Any], threads: int) -> Callable[[], object]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, {"x": values})


def _nothing() -> bytes:
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    return _serialized([helper.make_node("Relu", ["x"], ["y"])], x, y, [])


def _model(single: Single) -> bytes:
    """A file of the layer alone."""
    from onnx import TensorProto, helper, numpy_helper

    eight, outputs = single.bits == STORED, single.weight[0]
    generator = np.random.default_rng(0)
    constants: dict[str, np.ndarray[Any, Any]] = {}
    nodes = []
    read, weight, bias = "x", "w", "b"
    if eight:
        constants |= {
            "w": generator.integers(-127, 128, single.weight).astype(np.int8),
            "b": np.zeros(outputs, np.int32),
            "scales": np.full(outputs, 1e-3, np.float32),
            "scale": np.array(0.02, np.float32),
            "both": np.full(outputs, 2e-5, np.float32),
            "zero": np.array(128, np.uint8),
        }
        nodes += [
            helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["read"]),
            helper.make_node("DequantizeLinear", ["w", "scales"], ["weight"], axis=0),
            helper.make_node("DequantizeLinear", ["b", "both"], ["bias"], axis=0),
        ]
        read, weight, bias = "read", "weight", "bias"
    else:
        constants |= {
            "w": generator.standard_normal(single.weight).astype(np.float32),
            "b": np.zeros(outputs, np.float32),
        }
    if single.stride:
        attributes = {
            "strides": single.stride,
            "pads": single.padding * 2,
            "dilations": single.dilation,
            "group": single.groups,
        }
        integers = eight
        nodes.append(helper.make_node("Conv", [read, weight, bias], ["made" if eight else "y"], **attributes))
        if eight:
            nodes.append(helper.make_node("QuantizeLinear", ["made", "scale", "zero"], ["y"]))
    else:
        integers = False  # linear layers give floating numbers
        nodes.append(helper.make_node("Gemm", [read, weight, bias], ["y"], transB=1))
    kinds = TensorProto.UINT8 if eight else TensorProto.FLOAT, TensorProto.UINT8 if integers else TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", kinds[0], single.inputs)
    y = helper.make_tensor_value_info("y", kinds[1], None)
    stored_constants = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    return _serialized(nodes, x, y, stored_constants)


def _serialized(nodes: list[Any], x: Any, y: Any, constants: list[Any]) -> bytes:
    from onnx import helper

    graph = helper.make_graph(nodes, "layer", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10).SerializeToString()
