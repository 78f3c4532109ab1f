"""ONNX operators on numbers that Python holds: what networks compute from sizes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from penjing.core.onnx_reader.values import DTYPES, HOST_SIZE, Call, Host


def _each(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[[Call, list[Host]], Host]:
    def compute(call: Call, inputs: list[Host]) -> Host:
        arrays = np.broadcast_arrays(*[part.array for part in inputs]) if len(inputs) > 1 else [inputs[0].array]
        result = np.empty(arrays[0].shape, dtype=object)
        flat = [array.reshape(-1).tolist() for array in arrays]
        kind = dtype or inputs[-1].dtype
        found = [_rounded(function(*values), kind) for values in zip(*flat, strict=True)]
        result.reshape(-1)[...] = found or result.reshape(-1)
        return Host(result, kind)

    return compute


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if dtype is not torch.float32 or not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):  # infinite, as it is in float32
        return float(np.float32(value))


def as_meant(value: Any) -> Any:
    """A factor of float32 for products in 64 bits with a size that is open.

    The file's 0.7 is 0.69999998, of which ten are 7 in float32 and less in 64 bits. So this is the fraction that was
    rounded, and one unit in the last place more. Then of all factors p/q with q < 40 one in ten gives another whole
    part than float32 does at some size below 3000; without this, half of them.
    """
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    fraction = float(Fraction(value).limit_denominator(1000))
    return (
        value if fraction == value or np.float32(fraction) != np.float32(value) else math.nextafter(fraction, math.inf)
    )


def _multiplied(one: Any, other: Any) -> Any:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one * other
    return as_meant(one) * as_meant(other)


def _divided(one: Any, other: Any) -> Any:
    if isinstance(one, (torch.SymInt, torch.SymFloat)) and isinstance(other, float) and other:
        return one * as_meant(1 / other)
    if isinstance(one, (float, torch.SymFloat)) or isinstance(other, (float, torch.SymFloat)):
        return one / other
    if isinstance(other, int) and other < 0:
        one, other = -one, -other
    if statically_known_true(one >= 0):
        return one // other
    if isinstance(one, int):
        return -(-one // other)
    return torch.sym_ite(one < 0, -(-one // other), one // other)


def _mod(call: Call, inputs: list[Host]) -> Host:
    return _each(_remainder if call.attribute("fmod", 0) else operator.mod)(call, inputs)


def _remainder(one: Any, other: Any) -> Any:
    """With the sign of `one`."""
    if isinstance(one, float) or isinstance(other, float):
        return math.fmod(one, other)
    return one - other * _divided(one, other)


def _cast(call: Call, inputs: list[Host]) -> Host:
    dtype = DTYPES.get(call.attribute("to"))
    if dtype is None:
        raise call.refused("makes numbers of a type that penjing does not compute with")
    if dtype.is_floating_point:
        return _each(torch.sym_float, dtype)(call, inputs)
    return _each(bool if dtype is torch.bool else _whole, dtype)(call, inputs)


def _whole(value: Any) -> Any:
    if isinstance(value, (bool, float)):
        return int(value)
    return math.trunc(value) if isinstance(value, torch.SymFloat) else value


def _gather(call: Call, inputs: list[Host]) -> Host:
    data, indices = inputs
    places = indices.array.astype(np.int64)
    return Host(_array(np.take(data.array, places, axis=call.attribute("axis", 0))), data.dtype)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    result = np.empty((), dtype=object)
    result[()] = value
    return result


def _slice(call: Call, inputs: list[Host]) -> Host:
    data = inputs[0].array
    if call.version < 10:
        starts, ends, axes, steps = call.attribute("starts"), call.attribute("ends"), call.attribute("axes"), None
    else:
        starts, ends = call.sizes(1, "starts"), call.sizes(2, "ends")
        axes, steps = (call.sizes(index, "axes") if call.has(index) else None for index in (3, 4))
    parts = [slice(None)] * data.ndim
    for place, axis in enumerate(axes or range(len(starts))):
        parts[axis] = slice(starts[place], ends[place], steps[place] if steps else None)
    return Host(data[tuple(parts)], inputs[0].dtype)


def _transpose(call: Call, inputs: list[Host]) -> Host:
    return Host(np.transpose(inputs[0].array, call.attribute("perm")), inputs[0].dtype)


def _concat(call: Call, inputs: list[Host]) -> Host:
    return Host(np.concatenate([part.array for part in inputs], axis=call.attribute("axis")), inputs[0].dtype)


def _unsqueeze(call: Call, inputs: list[Host]) -> Host:
    return Host(np.expand_dims(inputs[0].array, tuple(call.axes() or ())), inputs[0].dtype)


def _squeeze(call: Call, inputs: list[Host]) -> Host:
    axes = call.axes()
    return Host(_array(np.squeeze(inputs[0].array, None if axes is None else tuple(axes))), inputs[0].dtype)


def _reshape(call: Call, inputs: list[Host]) -> Host:
    return Host(inputs[0].array.reshape([int(size) for size in inputs[1].array.tolist()]), inputs[0].dtype)


def _fill(call: Call, inputs: list[Host]) -> Host | None:
    sizes = inputs[0].array.reshape(-1).tolist()
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > 64:
        return None
    value = call.attribute("value")
    filled = np.empty(sizes, dtype=object)
    filled[...] = 0.0 if value is None else value.reshape(-1)[0].item()
    return Host(filled, torch.float32 if value is None else value.dtype)


def _range(call: Call, inputs: list[Host]) -> Host | None:
    values = [part.array.item() for part in inputs]
    if not all(isinstance(value, int) for value in values) or not 0 <= (values[1] - values[0]) * values[2] <= 64:
        return None
    found = list(range(*values))
    return Host(np.array(found, dtype=object), inputs[0].dtype)


def _expand(call: Call, inputs: list[Host]) -> Host | None:
    sizes = inputs[1].array.tolist()
    if not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > HOST_SIZE:
        return None
    return Host(
        np.array(np.broadcast_to(inputs[0].array, np.broadcast_shapes(inputs[0].array.shape, sizes))), inputs[0].dtype
    )


def _where(call: Call, inputs: list[Host]) -> Host:
    return _each(_chosen)(call, inputs)


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    if statically_known_true(condition):
        return one
    return other if statically_known_true(torch.sym_not(condition)) else torch.sym_ite(condition, one, other)


def _folded(function: Callable[[Any, Any], Any]) -> Callable[[Call, list[Host]], Host | None]:
    """A reduction of a list of sizes."""

    def compute(call: Call, inputs: list[Host]) -> Host | None:
        values = inputs[0].array
        if values.ndim != 1 or not values.size:
            return None
        total = values[0]
        for value in values[1:]:
            total = function(total, value)
        array = np.empty((1,) if call.attribute("keepdims", 1) else (), dtype=object)
        array[...] = total
        return Host(array, inputs[0].dtype)

    return compute


def _size(call: Call, inputs: list[Host]) -> Host:
    return Host(_array(inputs[0].array.size), torch.int64)


def _shape(call: Call, inputs: list[Host]) -> Host:
    found = list(inputs[0].array.shape)[call.attribute("start", 0) : call.attribute("end")]
    return Host(np.array(found, dtype=object), torch.int64)


def _floor(value: Any) -> Any:
    return torch.sym_float(math.floor(value))


def _ceil(value: Any) -> Any:
    return torch.sym_float(math.ceil(value))


HOST: dict[str, Callable[[Call, list[Host]], Host | None]] = {
    "Add": _each(operator.add),
    "Sub": _each(operator.sub),
    "Mul": _each(_multiplied),
    "Div": _each(_divided),
    "Mod": _mod,
    "Neg": _each(operator.neg),
    "Min": _each(lambda *values: _reduced(torch.sym_min, values)),
    "Max": _each(lambda *values: _reduced(torch.sym_max, values)),
    "Floor": _each(_floor),
    "Ceil": _each(_ceil),
    "Equal": _each(operator.eq, torch.bool),
    "Less": _each(operator.lt, torch.bool),
    "LessOrEqual": _each(operator.le, torch.bool),
    "Greater": _each(operator.gt, torch.bool),
    "GreaterOrEqual": _each(operator.ge, torch.bool),
    "Not": _each(lambda value: not value, torch.bool),
    "And": _each(lambda one, other: bool(one) and bool(other), torch.bool),
    "Or": _each(lambda one, other: bool(one) or bool(other), torch.bool),
    "Identity": _each(lambda value: value),
    "Where": _where,
    "Cast": _cast,
    "Gather": _gather,
    "Slice": _slice,
    "Transpose": _transpose,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "ConstantOfShape": _fill,
    "Range": _range,
    "Expand": _expand,
    "ReduceProd": _folded(operator.mul),
    "ReduceSum": _folded(operator.add),
    "ReduceMax": _folded(torch.sym_max),
    "ReduceMin": _folded(torch.sym_min),
    "Size": _size,
    "Shape": _shape,
}
"""What is computed when every input is a `Host`; None says that a tensor must be made."""


def _reduced(function: Callable[[Any, Any], Any], values: tuple[Any, ...]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = function(total, value)
    return total
