"""ONNX operators with weights, and pools."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.onnx_reader.values import Call, Size

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def _pads(
    call: Call, x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]
) -> tuple[list[Size], list[Size]]:
    """What is added before and behind each axis."""
    count = len(kernel)
    pads = call.attribute("pads", [0] * 2 * count)
    mode = call.attribute("auto_pad", "NOTSET")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        return pads[:count], pads[count:]
    before, behind = [], []
    for axis in range(count):
        size = x.shape[2 + axis]
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        steps = (size + strides[axis] - 1) // strides[axis]
        missing = torch.sym_max(0, (steps - 1) * strides[axis] + reach - size)
        half = missing // 2
        before.append(half if mode == "SAME_UPPER" else missing - half)
        behind.append(missing - half if mode == "SAME_UPPER" else half)
    return before, behind


def _even(before: list[Size], behind: list[Size]) -> bool:
    """Whether torch's own pads do; a comparison of open sizes would fix what the example has."""
    return all(isinstance(pad, int) for pad in (*before, *behind)) and before == behind


def _padded(x: Tensor, before: list[Size], behind: list[Size], value: float = 0.0) -> Tensor:
    flat = [size for pair in zip(reversed(before), reversed(behind), strict=True) for size in pair]
    return F.pad(x, flat, value=value)


def _conv(call: Call) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1, trained=True), call.optional(2, trained=True)
    count = x.ndim - 2
    if count not in _CONV:
        raise call.refused(f"has {count} axes of space; 1 to 3 are computed")
    strides = call.attribute("strides", [1] * count)
    dilations = call.attribute("dilations", [1] * count)
    before, behind = _pads(call, x, list(weight.shape[2:]), strides, dilations)
    if not _even(before, behind):
        x, before = _padded(x, before, behind), [0] * count
    return _CONV[count](x, weight, bias, strides, before, dilations, call.attribute("group", 1))


def _conv_transpose(call: Call) -> Tensor:
    x, weight, bias = call.tensor(0), call.tensor(1, trained=True), call.optional(2, trained=True)
    count = x.ndim - 2
    if count not in _TRANSPOSED:
        raise call.refused(f"has {count} axes of space; 1 to 3 are computed")
    strides = call.attribute("strides", [1] * count)
    dilations = call.attribute("dilations", [1] * count)
    extra = call.attribute("output_padding", [0] * count)
    pads = call.attribute("pads", [0] * 2 * count)
    before, behind = pads[:count], pads[count:]
    mode, wanted = call.attribute("auto_pad", "NOTSET"), call.attribute("output_shape")
    if wanted or mode.startswith("SAME"):
        before, behind = [], []
        for axis in range(count):
            reach = (weight.shape[2 + axis] - 1) * dilations[axis] + 1
            whole = (x.shape[2 + axis] - 1) * strides[axis] + reach + extra[axis]
            cut = whole - (wanted[-count + axis] if wanted else x.shape[2 + axis] * strides[axis])
            if isinstance(cut, int) and cut < 0:
                raise call.refused("asks for a larger output than its strides give")
            half = cut // 2
            before.append(cut - half if mode != "SAME_UPPER" else half)
            behind.append(half if mode != "SAME_UPPER" else cut - half)
    arguments: dict[str, Any] = {"stride": strides, "dilation": dilations, "groups": call.attribute("group", 1)}
    if _even(before, behind) and all(
        out < max(step, gap) for out, step, gap in zip(extra, strides, dilations, strict=True)
    ):
        return _TRANSPOSED[count](x, weight, bias, padding=before, output_padding=extra, **arguments)
    y = _TRANSPOSED[count](x, weight, bias, padding=0, **arguments)
    for axis in range(count):
        if extra[axis]:
            raise call.refused("has output_padding beside uneven pads, which penjing does not compute")
        y = y.narrow(2 + axis, before[axis], y.shape[2 + axis] - before[axis] - behind[axis])
    return y


def _gemm(call: Call) -> Tensor:
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    x = call.tensor(0).t() if call.attribute("transA", 0) else call.tensor(0)
    turned, weight, bias = call.attribute("transB", 0), call.constant(1), call.constant(2)
    columns = weight.shape[0 if turned else 1] if weight is not None else 0
    if weight is not None and (
        not call.has(2) or (bias is not None and (bias.numel() == 1 or (bias.numel() == columns == bias.shape[-1])))
    ):
        scaled = "" if alpha == 1 else "scaled"
        kept = call.changed(
            1, f"{'' if turned else 'T'}{scaled}", lambda value: _times(value if turned else value.t(), alpha)
        )
        if bias is None or beta == 0:
            return F.linear(x, kept)
        flat = "" if bias.ndim == 1 and bias.numel() == columns and beta == 1 else "flat"
        return F.linear(
            x,
            kept,
            call.changed(2, flat, lambda value: _times(value, beta).reshape(-1).expand(columns) if flat else value),
        )
    other = call.tensor(1, trained=True)
    y = x @ (other.t() if turned else other)
    y = y if alpha == 1 else y * alpha
    if call.has(2) and beta != 0:
        y = y + (call.tensor(2, trained=True) if beta == 1 else call.tensor(2) * beta)
    return y


def _times(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1 else value * factor


def _matmul(call: Call) -> Tensor:
    weight = call.constant(1)
    if weight is not None and weight.ndim == 2 and weight.is_floating_point():
        return F.linear(call.tensor(0), call.changed(1, "T", lambda value: value.t()))
    return torch.matmul(call.tensor(0, trained=True), call.tensor(1, trained=True))


def _einsum(call: Call) -> Tensor:
    return torch.einsum(
        call.attribute("equation"), *[call.tensor(index, trained=True) for index in range(len(call.values))]
    )


def _batch_norm(call: Call) -> Tensor:
    if call.attribute("training_mode", 0) or call.uses(1) or not call.attribute("spatial", 1):
        raise call.refused("is in training mode; export the network in evaluation mode")
    weight, bias = call.tensor(1, trained=True), call.tensor(2, trained=True)
    momentum, eps = 1 - call.attribute("momentum", 0.9), call.attribute("epsilon", 1e-5)
    return F.batch_norm(call.tensor(0), call.tensor(3), call.tensor(4), weight, bias, False, momentum, eps)


def _instance_norm(call: Call) -> Tensor:
    weight, bias = call.tensor(1, trained=True), call.tensor(2, trained=True)
    return F.instance_norm(call.tensor(0), weight=weight, bias=bias, eps=call.attribute("epsilon", 1e-5))


def _layer_norm(call: Call) -> Tensor:
    if call.uses(1) or call.uses(2):
        raise call.refused("gives its mean, which penjing does not compute")
    x, axis = call.tensor(0), call.attribute("axis", -1)
    shape, eps = x.shape[axis:], call.attribute("epsilon", 1e-5)
    weight, bias = call.tensor(1, trained=True), call.optional(2, trained=True)
    if weight.shape == shape and (bias is None or bias.shape == shape):
        return F.layer_norm(x, shape, weight, bias, eps)
    y = F.layer_norm(x, shape, None, None, eps) * weight
    return y if bias is None else y + bias


def _rms_norm(call: Call) -> Tensor:
    x, axis, weight = call.tensor(0), call.attribute("axis", -1), call.tensor(1, trained=True)
    return F.rms_norm(x, x.shape[axis:], None, call.attribute("epsilon", 1e-5)) * weight


def _group_norm(call: Call) -> Tensor:
    x, groups, eps = call.tensor(0), call.attribute("num_groups"), call.attribute("epsilon", 1e-5)
    each = x.shape[1] // groups if call.version < 21 else 1

    def spread(index: int) -> Tensor:
        if each == 1:
            return call.tensor(index, trained=True)
        if call.constant(index) is None:
            return call.tensor(index).repeat_interleave(each)
        return call.changed(index, "channels", lambda value: value.repeat_interleave(each))

    return F.group_norm(x, groups, spread(1), spread(2), eps)


def _local_response(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attribute("size")
    before = (size - 1) // 2
    squares = F.pad((x * x).unsqueeze(1), [0, 0] * (x.ndim - 2) + [before, size - 1 - before])
    summed = F.avg_pool3d(squares.flatten(3).unsqueeze(-1) if x.ndim != 4 else squares, (size, 1, 1), 1)
    summed = summed.reshape(x.shape) if x.ndim != 4 else summed.squeeze(1)
    return x / (summed * call.attribute("alpha", 1e-4) + call.attribute("bias", 1.0)) ** call.attribute("beta", 0.75)


def _lp_norm(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis", -1)
    norm = torch.linalg.vector_norm(x, call.attribute("p", 2), axis, keepdim=True)
    return torch.where(norm == 0, 0.0, x / norm)


def _mean_variance(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.attribute("axes", [0, 2, 3])
    centred = x - x.mean(axes, keepdim=True)
    return centred / ((centred * centred).mean(axes, keepdim=True).sqrt() + 1e-9)


def _pool_settings(call: Call, x: Tensor) -> tuple[list[int], list[int], list[int], list[Size], list[Size], bool]:
    kernel = call.attribute("kernel_shape")
    count = len(kernel)
    if count not in _MAX or x.ndim != count + 2:
        raise call.refused(f"has {count} axes of space; 1 to 3 are computed")
    strides = call.attribute("strides", [1] * count)
    dilations = call.attribute("dilations", [1] * count)
    before, behind = _pads(call, x, kernel, strides, dilations)
    return kernel, strides, dilations, before, behind, bool(call.attribute("ceil_mode", 0))


def _inside(before: list[Size], behind: list[Size], kernel: list[int]) -> bool:
    """Whether torch's pools take the pads themselves."""
    return _even(before, behind) and all(2 * pad <= size for pad, size in zip(before, kernel, strict=True))


def _begun(y: Tensor, x: Tensor, before: list[Size], strides: list[int]) -> Tensor:
    """`y` without windows that begin behind `x`, which ceil_mode makes where there are pads."""
    for axis, (pad, stride) in enumerate(zip(before, strides, strict=True), 2):
        count, most = y.shape[axis], (x.shape[axis] + pad + stride - 1) // stride
        if not isinstance(count, int) or not isinstance(most, int) or count > most:
            y = torch.ops.aten.slice.Tensor(y, axis, 0, most)
    return y


def _max_pool(call: Call) -> Tensor:
    if call.uses(1):
        raise call.refused("gives indices, which penjing does not compute")
    x = call.tensor(0)
    kernel, strides, dilations, before, behind, ceil = _pool_settings(call, x)
    pool = _MAX[len(kernel)]
    if _inside(before, behind, kernel):
        return pool(x, kernel, strides, before, dilations, ceil)
    least = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    y = pool(_padded(x, before, behind, least), kernel, strides, 0, dilations, ceil)
    return _begun(y, x, before, strides) if ceil else y


def _average_pool(call: Call) -> Tensor:
    x = call.tensor(0)
    kernel, strides, dilations, before, behind, ceil = _pool_settings(call, x)
    if any(gap != 1 for gap in dilations):
        raise call.refused("has dilations, which penjing does not compute")
    counted = bool(call.attribute("count_include_pad", 0))
    average = _AVERAGE[len(kernel)]
    if _inside(before, behind, kernel):
        return average(x, kernel, strides, before, ceil, counted)
    y = average(_padded(x, before, behind), kernel, strides, 0, ceil)
    y = y if counted else y / average(_padded(torch.ones_like(x), before, behind), kernel, strides, 0, ceil)
    return _begun(y, x, before, strides) if ceil else y


def _lp_pool(call: Call) -> Tensor:
    x, order = call.tensor(0), float(call.attribute("p", 2))
    kernel, strides, dilations, before, behind, ceil = _pool_settings(call, x)
    if any(gap != 1 for gap in dilations) or ceil:
        raise call.refused("has dilations or ceil_mode, which penjing does not compute")
    powers = _padded(x.abs() ** order, before, behind)
    return (_AVERAGE[len(kernel)](powers, kernel, strides) * math.prod(kernel)) ** (1 / order)


def _global_average(call: Call) -> Tensor:
    x = call.tensor(0)
    return _ADAPTIVE[x.ndim - 2](x, 1) if x.ndim - 2 in _ADAPTIVE else x.mean(list(range(2, x.ndim)), keepdim=True)


def _global_max(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.amax(list(range(2, x.ndim)), keepdim=True)


OPERATORS: dict[str, Callable[[Call], Any]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Einsum": _einsum,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "GroupNormalization": _group_norm,
    "LRN": _local_response,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
}
