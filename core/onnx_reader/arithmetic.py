"""ONNX operators that work on each element, and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.onnx_reader.values import DTYPES, Call


def _unary(function: Callable[[Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0))


def _binary(function: Callable[[Any, Any], Any], trained: bool = False) -> Callable[[Call], Tensor]:
    def compute(call: Call) -> Tensor:
        one, other = (call.operand(index, trained and call.is_weight(index)) for index in (0, 1))
        if not isinstance(one, Tensor) and not isinstance(other, Tensor):
            one = call.tensor(0)
        return function(one, other)

    return compute


def _divided(one: Any, other: Any) -> Any:
    whole = not any(
        isinstance(part, float) or (isinstance(part, Tensor) and part.is_floating_point()) for part in (one, other)
    )
    if not whole:
        return one / other
    return torch.div(one if isinstance(one, Tensor) else torch.full_like(other, one), other, rounding_mode="trunc")


def _logical(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Call], Tensor]:
    return lambda call: function(call.tensor(0), call.tensor(1))


def _many(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Call], Tensor]:
    def compute(call: Call) -> Tensor:
        result = call.tensor(0)
        for index in range(1, len(call.values)):
            result = function(result, call.tensor(index))
        return result

    return compute


def _mod(call: Call) -> Tensor:
    one, other = call.tensor(0), call.tensor(1)
    return torch.fmod(one, other) if call.attribute("fmod", 0) else torch.remainder(one, other)


def _power(call: Call) -> Tensor:
    base, exponent = call.tensor(0), call.operand(1)
    if not isinstance(exponent, Tensor) and not base.is_floating_point() and float(exponent).is_integer():
        exponent = int(exponent)
    return torch.pow(base, exponent).to(base.dtype)


def _shift(call: Call) -> Tensor:
    left = call.attribute("direction") == "LEFT"
    return (torch.bitwise_left_shift if left else torch.bitwise_right_shift)(call.tensor(0), call.tensor(1))


def _clip(call: Call) -> Tensor:
    bounds = [call.attribute(name) for name in ("min", "max")]
    for index in (1, 2):
        if call.has(index):
            bounds[index - 1] = call.number(index, "bound")
    low, high = bounds
    x = call.tensor(0)
    if low is None and high is None:
        return x
    if low == 0 and high is None:
        return torch.relu(x)
    if low is not None and high is not None and low <= high and x.is_floating_point():
        return F.hardtanh(x, low, high)
    return torch.clamp(x, low, high)


def _prelu(call: Call) -> Tensor:
    x, slope = call.tensor(0), call.constant(1)
    if slope is not None and (
        slope.numel() == 1 or (x.ndim >= 2 and tuple(slope.shape) == (x.shape[1],) + (1,) * (x.ndim - 2))
    ):
        return F.prelu(x, call.changed(1, "flat", lambda value: value.reshape(-1)))
    weight = call.tensor(1, trained=True)
    return torch.where(x >= 0, x, x * weight)


def _hard_sigmoid(call: Call) -> Tensor:
    alpha, beta, x = call.attribute("alpha", 0.2), call.attribute("beta", 0.5), call.tensor(0)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return F.hardsigmoid(x)
    return torch.clamp(x * alpha + beta, 0.0, 1.0)


def _selu(call: Call) -> Tensor:
    alpha, gamma = call.attribute("alpha", 1.6732632), call.attribute("gamma", 1.0507010)
    x = call.tensor(0)
    if abs(alpha - 1.6732632) < 1e-5 and abs(gamma - 1.0507010) < 1e-5:
        return F.selu(x)
    return F.elu(x, alpha) * gamma


def _gelu(call: Call) -> Tensor:
    return F.gelu(call.tensor(0), approximate=call.attribute("approximate", "none"))


def _shrink(call: Call) -> Tensor:
    x, bias, edge = call.tensor(0), call.attribute("bias", 0.0), call.attribute("lambd", 0.5)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, torch.zeros_like(x)))


def _swish(call: Call) -> Tensor:
    x, alpha = call.tensor(0), call.attribute("alpha", 1.0)
    return F.silu(x) if alpha == 1 else x * torch.sigmoid(x * alpha)


def _infinite(call: Call) -> Tensor:
    x = call.tensor(0)
    found = torch.isinf(x)
    if not call.attribute("detect_positive", 1):
        found = torch.logical_and(found, x < 0)
    if not call.attribute("detect_negative", 1):
        found = torch.logical_and(found, x > 0)
    return found


def _cast(call: Call) -> Tensor:
    x, wanted = call.tensor(0), DTYPES.get(call.attribute("to"))
    if wanted is None:
        raise call.refused(f"makes numbers of the type {call.attribute('to')}, which penjing does not compute with")
    return x if x.dtype == wanted else x.to(wanted)


def _cast_like(call: Call) -> Tensor:
    return call.tensor(0).to(call.tensor(1).dtype)


def _softmax(function: Callable[..., Tensor]) -> Callable[[Call], Tensor]:
    """Before version 13 the axis and all behind it are one."""

    def compute(call: Call) -> Tensor:
        x = call.tensor(0)
        axis = call.attribute("axis", -1 if call.version >= 13 else 1)
        axis += x.ndim if axis < 0 else 0
        if call.version >= 13 or axis == x.ndim - 1 or all(size == 1 for size in x.shape[axis + 1 :]):
            return function(x, dim=axis)
        return function(x.flatten(axis), dim=axis).view(x.shape)

    return compute


def _hardmax(x: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(x).scatter(dim, x.argmax(dim, keepdim=True), 1.0)


def _reduce(
    function: Callable[[Tensor, list[int], bool], Tensor], each: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[Call], Tensor]:
    """`each` is what is left where no axis is reduced."""

    def compute(call: Call) -> Tensor:
        x, axes = call.tensor(0), call.axes()
        if not x.ndim or (not axes and call.attribute("noop_with_empty_axes", 0)):
            return each(x)
        return function(x, axes or list(range(x.ndim)), bool(call.attribute("keepdims", 1)))

    return compute


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


def _norm(order: int) -> Callable[[Tensor, list[int], bool], Tensor]:
    def compute(x: Tensor, axes: list[int], keep: bool) -> Tensor:
        if x.is_floating_point():
            return torch.linalg.vector_norm(x, order, axes, keep)
        return _sum_of(x.abs(), axes, keep) if order == 1 else _like(_squares(x, axes, keep).double().sqrt(), x)

    return compute


def _like(y: Tensor, x: Tensor) -> Tensor:
    """`y` in the type of `x`: ONNX reduces integers to integers."""
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _sum_of(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.sum(axes, keep, dtype=x.dtype)


def _mean_of(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    if x.is_floating_point():
        return x.mean(axes, keep)
    count = math.prod(x.shape[axis] for axis in axes)
    return torch.div(_sum_of(x, axes, keep), count, rounding_mode="trunc")


def _squares(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return (x * x).sum(axes, keep, dtype=x.dtype)


def _extreme(largest: bool) -> Callable[[Call], Tensor]:
    def compute(call: Call) -> Tensor:
        x, axis = call.tensor(0), call.attribute("axis", 0)
        keep = bool(call.attribute("keepdims", 1))
        if call.attribute("select_last_index", 0):
            place = (torch.argmax if largest else torch.argmin)(x.flip(axis), axis, keepdim=keep)
            return x.shape[axis] - 1 - place
        return (torch.argmax if largest else torch.argmin)(x, axis, keepdim=keep)

    return compute


def _cumulative(call: Call) -> Tensor:
    x, axis = call.tensor(0), int(call.number(1, "axis"))
    backwards = call.attribute("reverse", 0)
    x = x.flip(axis) if backwards else x
    total = torch.cumsum(x, axis, dtype=x.dtype)
    total = total - x if call.attribute("exclusive", 0) else total
    return total.flip(axis) if backwards else total


def _dropout(call: Call) -> Any:
    x = call.tensor(0)
    if call.has(2) and any(call.sizes(2, "training_mode")):
        ratio = float(call.number(1, "ratio")) if call.has(1) else 0.5
    else:
        ratio = call.attribute("ratio", 0.5)
        ratio = float(call.number(1, "ratio")) if call.has(1) else ratio
    kept = F.dropout(x, ratio, training=False)
    return (kept, torch.ones_like(x, dtype=torch.bool)) if call.uses(1) else kept


def _where(call: Call) -> Tensor:
    condition, one, other = call.tensor(0), call.operand(1), call.operand(2)
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):
        one = call.tensor(1)
    return torch.where(condition, one, other)


OPERATORS: dict[str, Callable[[Call], Any]] = {
    "Abs": _unary(torch.abs),
    "Neg": _unary(torch.neg),
    "Sign": _unary(torch.sign),
    "Floor": _unary(torch.floor),
    "Ceil": _unary(torch.ceil),
    "Round": _unary(torch.round),
    "Sqrt": _unary(torch.sqrt),
    "Reciprocal": _unary(torch.reciprocal),
    "Exp": _unary(torch.exp),
    "Log": _unary(torch.log),
    "Erf": _unary(torch.erf),
    **{name.capitalize(): _unary(getattr(torch, name)) for name in ("sin", "cos", "tan", "asin", "acos", "atan")},
    **{name.capitalize(): _unary(getattr(torch, name)) for name in ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")},
    "IsNaN": _unary(torch.isnan),
    "IsInf": _infinite,
    "Not": _unary(torch.logical_not),
    "BitwiseNot": _unary(torch.bitwise_not),
    "Relu": _unary(torch.relu),
    "Sigmoid": _unary(torch.sigmoid),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "HardSwish": _unary(F.hardswish),
    "Mish": _unary(F.mish),
    "Identity": _unary(lambda x: x),
    "LeakyRelu": lambda call: F.leaky_relu(call.tensor(0), call.attribute("alpha", 0.01)),
    "Elu": lambda call: F.elu(call.tensor(0), call.attribute("alpha", 1.0)),
    "Celu": lambda call: F.celu(call.tensor(0), call.attribute("alpha", 1.0)),
    "ThresholdedRelu": lambda call: F.threshold(call.tensor(0), call.attribute("alpha", 1.0), 0.0),
    "Selu": _selu,
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "PRelu": _prelu,
    "Shrink": _shrink,
    "Swish": _swish,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Add": _binary(lambda one, other: one + other, trained=True),
    "Sub": _binary(lambda one, other: one - other),
    "Mul": _binary(lambda one, other: one * other, trained=True),
    "Div": _binary(_divided),
    "Pow": _power,
    "Mod": _mod,
    "BitShift": _shift,
    "Equal": _binary(lambda one, other: one == other),
    "Greater": _binary(lambda one, other: one > other),
    "GreaterOrEqual": _binary(lambda one, other: one >= other),
    "Less": _binary(lambda one, other: one < other),
    "LessOrEqual": _binary(lambda one, other: one <= other),
    "And": _logical(torch.logical_and),
    "Or": _logical(torch.logical_or),
    "Xor": _logical(torch.logical_xor),
    "BitwiseAnd": _logical(torch.bitwise_and),
    "BitwiseOr": _logical(torch.bitwise_or),
    "BitwiseXor": _logical(torch.bitwise_xor),
    "Min": _many(torch.minimum),
    "Max": _many(torch.maximum),
    "Sum": _many(torch.add),
    "Mean": lambda call: _many(torch.add)(call) / len(call.values),
    "Where": _where,
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Hardmax": _softmax(_hardmax),
    "Dropout": _dropout,
    "ReduceSum": _reduce(_sum_of),
    "ReduceMean": _reduce(_mean_of),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin),
    "ReduceProd": _reduce(_product),
    "ReduceL1": _reduce(_norm(1), torch.abs),
    "ReduceL2": _reduce(_norm(2), torch.abs),
    "ReduceSumSquare": _reduce(_squares, lambda x: x * x),
    "ReduceLogSum": _reduce(lambda x, axes, keep: _like(x.sum(axes, keep).log(), x), torch.log),
    "ReduceLogSumExp": _reduce(lambda x, axes, keep: _like(torch.logsumexp(x, axes, keep), x)),
    "ArgMax": _extreme(largest=True),
    "ArgMin": _extreme(largest=False),
    "CumSum": _cumulative,
}
