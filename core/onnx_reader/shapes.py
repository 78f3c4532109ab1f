"""ONNX operators that move, cut, join and make tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penjing.core.onnx_reader.values import Call, Host, Size, host

_PAD = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _shape(call: Call) -> Host:
    x = call.tensor(0)
    return host(list(x.shape)[call.attribute("start", 0) : call.attribute("end")])


def _size(call: Call) -> Host:
    total: Size = 1
    for size in call.tensor(0).shape:
        total = total * size
    return host(total)


def _reshape(call: Call) -> Tensor:
    x = call.tensor(0)
    sizes = call.sizes(1, "shape")
    if not call.attribute("allowzero", 0):
        sizes = [x.shape[axis] if isinstance(size, int) and size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(_inferred(x, sizes))


def _inferred(x: Tensor, sizes: list[Size]) -> list[Size]:
    """A size that can be told from the others as -1, so that a changed batch or width passes."""
    if -1 in [size for size in sizes if isinstance(size, int)]:
        return sizes
    open_axes = [axis for axis, size in enumerate(sizes) if not isinstance(size, int)]
    equal = [axis for axis in open_axes if axis < x.ndim and x.shape[axis] is sizes[axis]]
    others = [axis for axis in open_axes if axis not in equal]
    if len(others) == 1:
        sizes = [-1 if axis == others[0] else size for axis, size in enumerate(sizes)]
    return sizes


def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis", 1)
    axis += x.ndim if axis < 0 else 0
    if axis == 1 and x.ndim >= 2:
        return x.flatten(1)
    if axis == 0:
        return x.reshape(1, -1)
    return x.flatten(axis).flatten(0, axis - 1) if axis < x.ndim else x.reshape(-1, 1)


def _squeeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.axes()
    if axes is None:
        axes = [axis for axis, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    return x.squeeze(axes) if len(axes) != 1 else x.squeeze(axes[0])


def _unsqueeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.axes() or []
    rank = x.ndim + len(axes)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _transpose(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.permute(call.attribute("perm", list(range(x.ndim))[::-1]))


def _expand(call: Call) -> Tensor:
    x, sizes = call.tensor(0), call.sizes(1, "shape")
    missing = max(len(sizes) - x.ndim, 0)
    own = [1] * missing + list(x.shape)
    sizes = [1] * (len(own) - len(sizes)) + sizes
    wanted = [
        -1 if (isinstance(size, int) and size == 1) or (axis >= missing and size is own[axis]) else size
        for axis, size in enumerate(sizes)
    ]
    if missing:
        x = x.reshape([1] * missing + list(x.shape)) if missing > 1 else x.unsqueeze(0)
    return x if all(isinstance(size, int) and size == -1 for size in wanted) else x.expand(wanted)


def _tile(call: Call) -> Tensor:
    return call.tensor(0).repeat(call.sizes(1, "repeats"))


def _concat(call: Call) -> Tensor:
    return torch.cat([call.tensor(index) for index in range(len(call.values))], call.attribute("axis", 1))


def _split(call: Call) -> tuple[Tensor, ...]:
    x, axis = call.tensor(0), call.attribute("axis", 0)
    sizes = call.attribute("split")
    if call.has(1):
        sizes = call.sizes(1, "sizes")
    if sizes is None:
        count = call.attribute("num_outputs", len(call.node.outputs))
        return torch.split(x, (x.shape[axis] + count - 1) // count, axis)
    return torch.split(x, sizes, axis)


def _slice(call: Call) -> Tensor:
    x = call.tensor(0)
    if call.version < 10:
        starts, ends, axes, steps = call.attribute("starts"), call.attribute("ends"), call.attribute("axes"), None
    else:
        starts, ends = call.sizes(1, "starts"), call.sizes(2, "ends")
        axes = call.sizes(3, "axes") if call.has(3) else None
        steps = call.sizes(4, "steps") if call.has(4) else None
    for place, axis in enumerate(axes if axes is not None else range(len(starts))):
        start, end, step = starts[place], ends[place], steps[place] if steps else 1
        axis += x.ndim if axis < 0 else 0
        if step > 0:
            end = min(end, (1 << 63) - 1) if isinstance(end, int) else end
            if not (isinstance(start, int) and start == 0 and isinstance(end, int) and end > 1 << 30 and step == 1):
                x = torch.ops.aten.slice.Tensor(x, axis, start, end, step)
            continue
        size = int(x.shape[axis])  # a negative step needs a size that is fixed
        places = list(range(size))[slice(start, None if end < -size else end, step)]
        x = x.flip(axis) if len(places) == size else x.index_select(axis, torch.tensor(places, dtype=torch.int64))
    return x


def _gather(call: Call) -> Tensor:
    x, axis = call.tensor(0, trained=True), call.attribute("axis", 0)
    numbers = call.host(1)
    axis += x.ndim if axis < 0 else 0
    if numbers is not None and not numbers.array.ndim and not isinstance(numbers.array.item(), torch.SymInt):
        return x.select(axis, numbers.array.item())
    indices = call.tensor(1)
    if call.constant(1) is None and axis == 0 and x.ndim == 2 and call.constant(0) is not None:
        return F.embedding(indices, x)  # ids of words: negative ones stay an error
    if numbers is None or any(number < 0 for number in numbers.array.reshape(-1).tolist() if isinstance(number, int)):
        indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    flat = x.index_select(axis, indices.reshape(-1))
    return flat if indices.ndim == 1 else flat.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _gather_elements(call: Call) -> Tensor:
    x, indices, axis = call.tensor(0), call.tensor(1), call.attribute("axis", 0)
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def _gather_nd(call: Call) -> Tensor:
    x, indices, batch = call.tensor(0), call.tensor(1), call.attribute("batch_dims", 0)
    if batch:
        raise call.refused("has batch_dims, which penjing does not compute")
    return x[tuple(indices.unbind(-1))]


def _scatter_elements(call: Call) -> Tensor:
    x, indices, updates = call.tensor(0), call.tensor(1), call.tensor(2)
    axis, how = call.attribute("axis", 0), call.attribute("reduction", "none")
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    if how == "none":
        return x.scatter(axis, indices, updates)
    kinds = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
    return x.scatter_reduce(axis, indices, updates, kinds[how])


def _scatter_nd(call: Call) -> Tensor:
    x, indices, updates = call.tensor(0), call.tensor(1), call.tensor(2)
    how = call.attribute("reduction", "none")
    if how not in ("none", "add"):
        raise call.refused(f"has the reduction {how}, which penjing does not compute")
    return torch.ops.aten.index_put.default(x, list(indices.unbind(-1)), updates, how == "add")


def _pad(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.attribute("mode", "constant")
    if call.version < 11:
        pads, value = call.attribute("pads"), call.attribute("value", 0.0)
    else:
        pads = call.sizes(1, "pads")
        value = call.number(2, "value") if call.has(2) else 0
    axes = [int(axis) % x.ndim for axis in call.sizes(3, "axes")] if call.has(3) else list(range(x.ndim))
    before, behind = [0] * x.ndim, [0] * x.ndim
    for place, axis in enumerate(axes):
        before[axis], behind[axis] = pads[place], pads[place + len(axes)]
    if mode not in _PAD:
        raise call.refused(f"has the mode {mode!r}, which penjing does not compute")
    used = [axis for axis in range(x.ndim) if not _none(before[axis]) or not _none(behind[axis])]
    if not used:
        return x
    if mode == "constant":
        flat = [size for axis in range(x.ndim - 1, min(used) - 1, -1) for size in (before[axis], behind[axis])]
        return F.pad(x, flat, value=value)
    if min(used) < 1 or x.ndim < 3:
        missing = 3 - x.ndim + (1 if min(used) < 1 else 0)
        inner = x.reshape([1] * max(missing, 1) + list(x.shape))
    else:
        inner = x
    first = max(2, inner.ndim - x.ndim + min(used))
    if inner.ndim - x.ndim + min(used) < 2:
        inner, first = inner.unsqueeze(0), 2
    shift = inner.ndim - x.ndim
    flat = [
        size for axis in range(inner.ndim - 1, first - 1, -1) for size in (before[axis - shift], behind[axis - shift])
    ]
    y = F.pad(inner, flat, mode=_PAD[mode])
    return y.reshape(y.shape[shift:]) if shift else y


def _none(size: Size) -> bool:
    return isinstance(size, int) and size == 0


def _filled(call: Call) -> Tensor:
    value = call.attribute("value")
    sizes = call.sizes(0, "shape")
    if value is None:
        return torch.zeros(sizes)
    return torch.full(sizes, value.reshape(-1)[0].item(), dtype=value.dtype)


def _range(call: Call) -> Tensor:
    start, end, step = (call.number(index, "bounds") for index in range(3))
    kind = call.values[0]
    dtype = kind.dtype if isinstance(kind, (Tensor, Host)) else call.tensor(0).dtype
    return torch.arange(start, end, step, dtype=dtype)


def _one_hot(call: Call) -> Tensor:
    indices, values, axis = call.tensor(0), call.tensor(2), call.attribute("axis", -1)
    depth = int(call.number(1, "depth"))
    places = torch.arange(depth)
    indices = torch.where(indices < 0, indices + depth, indices).to(torch.int64)
    hot = indices.unsqueeze(-1) == places
    hot = torch.where(hot, values[1], values[0])
    return hot if axis == -1 else hot.movedim(-1, axis)


def _top_k(call: Call) -> tuple[Tensor, Tensor]:
    """Of equal values the first, which torch's `topk` does not promise."""
    count = int(call.attribute("k") if call.version < 10 else call.number(1, "k"))
    axis, falling = call.attribute("axis", -1), bool(call.attribute("largest", 1))
    values, indices = torch.sort(call.tensor(0), dim=axis, descending=falling, stable=True)
    return values.narrow(axis, 0, count), indices.narrow(axis, 0, count)


def _trilu(call: Call) -> Tensor:
    diagonal = int(call.number(1, "k")) if call.has(1) else 0
    return (torch.triu if call.attribute("upper", 1) else torch.tril)(call.tensor(0), diagonal)


def _depth_to_space(call: Call) -> Tensor:
    x, block = call.tensor(0), call.attribute("blocksize")
    if call.attribute("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    channels = x.shape[1] // block**2
    parts = x.reshape(-1, block, block, channels, x.shape[2], x.shape[3]).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(-1, channels, x.shape[2] * block, x.shape[3] * block)


def _space_to_depth(call: Call) -> Tensor:
    x, block = call.tensor(0), call.attribute("blocksize")
    channels, height, width = x.shape[1], x.shape[2] // block, x.shape[3] // block
    parts = x.reshape(-1, channels, height, block, width, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(-1, channels * block**2, height, width)


def _eye_like(call: Call) -> Tensor:
    x = call.tensor(0)
    dtype = x.dtype if call.attribute("dtype") is None else None
    if dtype is None or call.attribute("k", 0):
        raise call.refused("has another type or diagonal, which penjing does not compute")
    return torch.eye(x.shape[0], x.shape[1], dtype=dtype)


def _non_zero(call: Call) -> Tensor:
    if call.constant(0) is None:
        raise call.refused("gives an output whose size depends on values; penjing needs fixed shapes")
    return torch.nonzero(call.tensor(0)).t().contiguous()


OPERATORS: dict[str, Callable[[Call], Any]] = {
    "Shape": _shape,
    "Size": _size,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Pad": _pad,
    "ConstantOfShape": _filled,
    "Range": _range,
    "OneHot": _one_hot,
    "TopK": _top_k,
    "Trilu": _trilu,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "EyeLike": _eye_like,
    "NonZero": _non_zero,
}
