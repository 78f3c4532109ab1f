"""An ONNX model whose floating numbers are wider than those of its file: rounding is gone, what it computes stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_NUMBERS = ("value_float", "value_floats")  # of Constant
_TYPES = {"Cast": "to", "EyeLike": "dtype"}  # attributes that name a type
_NUMPY = {ir.DataType.FLOAT: np.float32, ir.DataType.DOUBLE: np.float64}


def widen(model: ir.Model, wanted: ir.DataType) -> None:
    """Make every floating number of `model` that is narrower than `wanted` one of `wanted`, in place.

    Weights, constants, casts, and the types that values are declared with; functions must be inlined.
    """
    for value in model.graph.inputs:
        _declare(value, wanted)
    _widen_graph(model.graph, wanted)


def _narrower(dtype: ir.DataType | None, wanted: ir.DataType) -> bool:
    return dtype in _FLOATS[: _FLOATS.index(wanted)]


def _declare(value: ir.Value, wanted: ir.DataType) -> None:
    if _narrower(value.dtype, wanted):
        value.dtype = wanted


def _widen_graph(graph: ir.Graph, wanted: ir.DataType) -> None:
    for value in graph.initializers.values():
        if value.const_value is not None and _narrower(value.const_value.dtype, wanted):
            value.const_value = _tensor(value.const_value, wanted)
        _declare(value, wanted)
    for node in graph:
        for name, attribute in list(node.attributes.items()):
            node.attributes[name] = _attribute(node, attribute, wanted)
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.zeros(1, _NUMPY[wanted])))
        number = next((node.attributes.pop(name) for name in _NUMBERS if name in node.attributes), None)
        if number is not None:
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.array(number.value, _NUMPY[wanted])))
        if node.op_type == "BatchNormalization":  # at 1, onnx's evaluator keeps to the stored mean as it must
            node.attributes["momentum"] = ir.AttrFloat32("momentum", 1.0)
        for value in node.outputs:
            _declare(value, wanted)


def _attribute(node: ir.Node, attribute: Any, wanted: ir.DataType) -> Any:
    if attribute.type == ir.AttributeType.GRAPH:
        _widen_graph(attribute.value, wanted)
    elif attribute.type == ir.AttributeType.TENSOR and _narrower(attribute.value.dtype, wanted):
        return ir.AttrTensor(attribute.name, _tensor(attribute.value, wanted))
    elif attribute.name == _TYPES.get(node.op_type) and _narrower(ir.DataType(attribute.value), wanted):
        return ir.AttrInt64(attribute.name, int(wanted))
    return attribute


def _tensor(value: ir.TensorProtocol, wanted: ir.DataType) -> ir.TensorProtocol:
    return ir.tensor(np.asarray(value.numpy()).astype(_NUMPY[wanted]), name=value.name)
