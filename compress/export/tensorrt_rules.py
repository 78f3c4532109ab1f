"""What TensorRT 10 and 11 take of a Q/DQ network, checked without TensorRT: it builds engines on a GPU alone.

Sources: NVIDIA TensorRT documentation, "Working with Quantized Types" and the operators Quantize and Dequantize: scales
are constants known when the engine is built and positive, zero points are 0, INT8 or FP8 alone; weights have a scale
for each output channel; explicit quantization wants a pair before both inputs of a product.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from penjing.compress.quantize.targets import TARGETS
from penjing.core.errors import InputError

OPERATORS = {
    "Add", "Conv", "DequantizeLinear", "Gemm", "GlobalAveragePool", "MaxPool", "QuantizeLinear", "Relu", "Reshape",
}  # fmt: skip
_STORED = (TensorProto.INT8, TensorProto.FLOAT8E4M3FN)


class Graph:
    """Look-ups in an ONNX model whose constants lie in the file itself."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.kinds = {constant.name: constant.data_type for constant in model.graph.initializer}
        self.constants: dict[str, NDArray] = {
            constant.name: numpy_helper.to_array(constant) for constant in model.graph.initializer
        }
        self._makers = {output: node for node in self.nodes for output in node.output}

    def maker(self, name: str) -> onnx.NodeProto | None:
        """The node that computes `name`; None for constants and inputs."""
        return self._makers.get(name)

    def readers(self, name: str) -> list[onnx.NodeProto]:
        """The nodes that read `name`."""
        return [node for node in self.nodes if name in node.input]


def check_tensorrt(model: onnx.ModelProto) -> None:
    """Check the rules above.

    Raises:
        InputError: names the first node that breaks one.
    """
    graph = Graph(model)
    for value in model.graph.input:
        kind, sizes = value.type.tensor_type.elem_type, value.type.tensor_type.shape.dim
        if kind != TensorProto.FLOAT or any(size.dim_param for size in sizes[1:]):
            raise _refused(value.name, "only float32 inputs whose batch alone is dynamic are taken")
    for node in graph.nodes:
        if node.domain or node.op_type not in OPERATORS:
            raise _refused(node.name, f"{node.domain or 'the operator'} {node.op_type} is not in the explicit form")
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _check_scale(graph, node)
        if node.op_type == "QuantizeLinear":
            _check_pair(graph, node)
        if node.op_type == "DequantizeLinear" and node.input[0] in graph.constants:
            _check_weight(graph, node)
        if node.op_type in ("Conv", "Gemm"):
            _check_product(graph, node)


def _check_scale(graph: Graph, node: onnx.NodeProto) -> None:
    scale = graph.constants.get(node.input[1])
    if scale is None or scale.dtype != np.float32:
        raise _refused(node.name, "its scale is not a float32 constant")
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise _refused(node.name, "a scale is not positive and finite")
    if len(node.input) < 3 or graph.kinds.get(node.input[2]) not in _STORED:
        raise _refused(node.name, "it is neither INT8 nor FP8; unsigned activations are ONNX Runtime's form")
    if graph.constants[node.input[2]].astype(np.float32).any():
        raise _refused(node.name, "its zero point is not 0")


def _check_pair(graph: Graph, node: onnx.NodeProto) -> None:
    if graph.constants[node.input[1]].ndim:
        raise _refused(node.name, "an activation has one scale")
    readers = graph.readers(node.output[0])
    if not readers or any(
        reader.op_type != "DequantizeLinear" or reader.input[1] != node.input[1] for reader in readers
    ):
        raise _refused(node.name, "each quantized value is read by DequantizeLinear with the same scale")


def _check_weight(graph: Graph, node: onnx.NodeProto) -> None:
    weight, scale = graph.constants[node.input[0]], graph.constants[node.input[1]]
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
    if graph.kinds[node.input[0]] not in _STORED:
        raise _refused(node.name, f"a constant of type {weight.dtype} is dequantized; biases stay floating")
    if axis != 0 or scale.shape != weight.shape[:1]:
        raise _refused(node.name, f"a weight {weight.shape} needs a scale for each of its output channels (axis 0)")
    if weight.dtype == np.int8 and weight.size and weight.min() < -127:
        raise _refused(node.name, "weights are within ±127")


def _check_product(graph: Graph, node: onnx.NodeProto) -> None:
    makers = [graph.maker(name) for name in node.input[:2]]
    quantized = [maker is not None and maker.op_type == "DequantizeLinear" for maker in makers]
    if quantized[1] and not quantized[0]:
        raise _refused(node.name, "its weight is quantized and its input is not")
    if len(node.input) > 2 and graph.kinds.get(node.input[2]) != TensorProto.FLOAT:
        raise _refused(node.name, "its bias is not a float32 constant")
    if quantized[1]:
        assert makers[1] is not None
        shape = graph.constants[makers[1].input[0]].shape
        smallest = TARGETS["tensorrt"].smallest_product
        if min(shape[0], int(np.prod(shape[1:]))) < smallest:
            raise _refused(node.name, f"a product {shape} with fewer than {smallest} inputs or outputs stays floating")


def _refused(name: str, rule: str) -> InputError:
    return InputError(f"TensorRT does not take {name}: {rule}; make the artifact with --target tensorrt")
