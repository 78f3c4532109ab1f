"""A classifier's ONNX file for another target than its artifact was made for, where the integers stay what they are.

From TensorRT's form to ONNX Runtime's each activation becomes unsigned: g + 128 with the zero point 128 is the same
value as g with 0, and biases become INT32, as in every file for ONNX Runtime. Unsigned activations have no such way
back: after a ReLU all 256 levels are positive, and TensorRT has 128 of these. So a network that is to run on both is
calibrated or trained for TensorRT. Weights beyond ±63 are not for `onnxruntime-avx2`.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from penjing.compress.export.tensorrt_rules import Graph
from penjing.compress.quantize.folded import LARGEST_BIAS
from penjing.compress.quantize.targets import TargetName
from penjing.compress.rounding.formats import INT7_WEIGHT
from penjing.core.artifact.onnx import Quantization
from penjing.core.errors import ConfigError

FLOATING_ADDITIONS = (
    "converted: additions run in floating point, which ONNX Runtime does not fuse; for full speed quantize for {target}"
)


def convert(model: onnx.ModelProto, quantization: Quantization, target: TargetName) -> tuple[str, ...]:
    """Change `model`, a file of a classifier, in place to what `target` runs with the same integers.

    Returns:
        What a user should know of the result.

    Raises:
        ConfigError: the integers cannot stay what they are.
    """
    source = quantization.target
    if source == target:
        return ()
    if quantization.activations == "fp8":
        raise ConfigError(f"FP8 runs on TensorRT alone; quantize the checkpoint again with --target {target}")
    if target == "tensorrt":
        raise ConfigError(
            f"the activations of a network for {source} are unsigned, TensorRT's are signed with the zero point 0: "
            "they do not convert exactly. Quantize or train it for tensorrt: that converts to ONNX Runtime exactly"
        )
    if target == "onnxruntime-avx2":
        _check_weights(Graph(model), target)
    if source == "tensorrt":
        _make_unsigned(model)
        _make_biases_integers(model)
    helper.set_model_props(model, {"penjing.target": target})
    onnx.checker.check_model(model, full_check=True)
    return (FLOATING_ADDITIONS.format(target=target),) if source == "tensorrt" else ()


def _check_weights(graph: Graph, target: TargetName) -> None:
    for name, weight in graph.constants.items():
        if name.endswith(".weight") and weight.dtype == np.int8 and np.abs(weight.astype(np.int16)).max() > 63:
            raise ConfigError(
                f"{name} has integers beyond ±{INT7_WEIGHT.high:g}, which {target} does not take; quantize the "
                f"checkpoint again with --target {target}"
            )


def _make_unsigned(model: onnx.ModelProto) -> None:
    zeros = {node.input[2] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    for constant in model.graph.initializer:
        if constant.name in zeros:
            shifted = numpy_helper.to_array(constant).astype(np.int16) + 128
            constant.CopyFrom(numpy_helper.from_array(shifted.astype(np.uint8), constant.name))
    del model.graph.value_info[:]  # which says that integers are signed


def _make_biases_integers(model: onnx.ModelProto) -> None:
    graph = Graph(model)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm") and len(node.input) == 3:
            step = _step(graph, node)
            bias = graph.constants[node.input[2]]
            if step is not None and (np.abs(bias) <= LARGEST_BIAS * 2 * step.astype(np.float64)).all():
                nodes.append(_integer_bias(model, node, bias, step))
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _step(graph: Graph, node: onnx.NodeProto) -> NDArray[np.float32] | None:
    """(channels,) scale of the accumulator, where input and weight are integers."""
    before, weight = graph.maker(node.input[0]), graph.maker(node.input[1])
    if before is None or weight is None or {before.op_type, weight.op_type} != {"DequantizeLinear"}:
        return None
    return (graph.constants[before.input[1]] * graph.constants[weight.input[1]]).astype(np.float32)


def _integer_bias(
    model: onnx.ModelProto, node: onnx.NodeProto, bias: NDArray[np.float32], step: NDArray[np.float32]
) -> onnx.NodeProto:
    name = node.input[2]
    integers = np.round(bias.astype(np.float64) / step.astype(np.float64)).astype(np.int32)
    kept = [constant for constant in model.graph.initializer if constant.name != name]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    model.graph.initializer.append(numpy_helper.from_array(integers, name))
    model.graph.initializer.append(numpy_helper.from_array(step, f"{name}/scale"))
    node.input[2] = f"{name}/dequantized"
    return helper.make_node(
        "DequantizeLinear", [name, f"{name}/scale"], [node.input[2]], name=f"{node.input[2]}/Dequantize", axis=0
    )
