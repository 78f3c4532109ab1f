"""What moving elements about does to labels: views, permutations, slices, concatenations."""

from __future__ import annotations

import numpy as np
import torch
from torch.fx import Node

from penjing.compress.prune.labels import NONE, Factor, Label, Labeler, split_with, varies
from penjing.compress.prune.rules import Call, UnknownOperation, rule, value_of


@rule("view_as", "reshape_as")
def reshape_as(labeler: Labeler, call: Call) -> Label:
    """The other's size is counted, so that it stays."""
    labeler.freeze(call.label(call.arg(1)))
    labeler.freeze(call.label(call.arg(0)))
    return NONE


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze")
def reshape(labeler: Labeler, call: Call) -> Label:
    """A part of a dimension whose size stands in the code beside an open one (−1) cannot shrink: it is pinned."""
    x = call.arg(0)
    if call.name == "view" and isinstance(call.arg(1), torch.dtype):
        raise UnknownOperation("other types share its memory")
    label = labeler.reshape(call.label(x), call.shape(x), call.shape())
    sizes = call.arg(2 if call.name == "unflatten" else 1)
    if labeler.rewrites or not isinstance(sizes, list | tuple) or -1 not in sizes:
        return label
    first = call.arg(1) % len(call.shape(x)) if call.name == "unflatten" else 0
    open_dim = first + list(sizes).index(-1)
    fixed = [dim for dim in split_with(open_dim, call.shape(x), call.shape()) if dim != open_dim]
    return labeler.pinned(label, fixed)


@rule("permute", "transpose", "t", "mT", "numpy_T", "movedim", "swapaxes")
def permute(labeler: Labeler, call: Call) -> Label:
    num_dims = len(call.shape())
    if call.name == "permute":
        order = [dim % num_dims for dim in call.arg(1)]
    elif call.name in ("transpose", "swapaxes"):
        order = list(range(num_dims))
        first, second = call.arg(1) % num_dims, call.arg(2) % num_dims
        order[first], order[second] = second, first
    elif call.name == "mT":
        order = [*range(num_dims - 2), num_dims - 1, num_dims - 2]
    elif call.name == "movedim":
        source, target = call.arg(1), call.arg(2)
        moved = np.moveaxis(np.empty(range(2, 2 + num_dims)), source, target).shape
        order = [size - 2 for size in moved]
    else:
        order = list(range(num_dims))[::-1]
    return tuple(factor.transpose(order) for factor in call.label(call.arg(0)))


@rule("expand", "expand_as", "broadcast_to")
def expand(labeler: Labeler, call: Call) -> Label:
    if call.name == "expand_as":
        labeler.freeze(call.label(call.arg(1)))
    missing = len(call.shape()) - len(call.shape(call.arg(0)))
    return tuple(factor.reshape((1,) * missing + factor.shape) for factor in call.label(call.arg(0)))


@rule("repeat", "tile")
def repeat(labeler: Labeler, call: Call) -> Label:
    """Copies one after the other: an index goes from each."""
    x, times = call.arg(0), list(call.arg(1))
    sizes, shape = call.shape(), call.shape(x)
    sources = (1,) * (len(sizes) - len(shape)) + shape
    if len(times) < len(sizes):
        times = [1] * (len(sizes) - len(times)) + times
    result = []
    for factor in call.label(x):
        factor = factor.reshape((1,) * (len(sizes) - factor.ndim) + factor.shape)
        reps = [sizes[d] // sources[d] if varies(factor, d) else 1 for d in range(len(sizes))]
        result.append(np.tile(factor, reps))
    return labeler.tidy(result)


@rule("repeat_interleave")
def repeat_interleave(labeler: Labeler, call: Call) -> Label:
    x, repeats, dim = call.arg(0), call.arg(1), call.arg(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        raise UnknownOperation("repeats that differ, or without a dimension")
    return tuple(f.repeat(repeats, dim) if varies(f, dim % len(call.shape(x))) else f for f in call.label(x))


def alone(factor: Factor, dim: int) -> bool:
    """Whether `dim` is the only dimension that the units depend on."""
    return varies(factor, dim) and factor.size == factor.shape[dim]


def part(labeler: Labeler, label: Label, dim: int, places: np.ndarray) -> Label:
    """The label of the indices `places` of `dim`. Units of a grid cannot be told apart by one of its dimensions."""
    taken = [
        f if not varies(f, dim) else f.take(places, dim) if alone(f, dim) else labeler.pin(f, [dim]) for f in label
    ]
    return labeler.tidy(taken)


@rule("slice", "narrow", "select")
def slices(labeler: Labeler, call: Call) -> Label:
    """Where places cannot be counted anew none before them may go: the dimension is pinned."""
    x = call.arg(0)
    dim = call.arg(1, "dim", 0) % len(call.shape(x))
    label = call.label(x)
    if call.shape() != call.shape(x):
        places = slice_of(call)
        if call.name == "select" or not labeler.rewrites or places is None or places.step != 1:
            label = labeler.pinned(label, [dim])
        else:
            label = part(labeler, label, dim, np.arange(places.start, places.stop))
    return tuple(factor.squeeze(dim) for factor in label) if call.name == "select" else label


def slice_of(call: Call) -> range | None:
    """The indices that a slice takes; None if they are not fixed."""
    size = call.shape(call.arg(0))[call.arg(1, "dim", 0) % len(call.shape(call.arg(0)))]
    if call.name == "narrow":
        start, stop, step = call.arg(2), None, 1
        stop = start + call.arg(3) if isinstance(start, int) and isinstance(call.arg(3), int) else call.node
    else:
        start, stop, step = call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    if any(isinstance(value, Node) for value in (start, stop, step)):
        return None
    return range(*slice(start, stop, step).indices(size))


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def split(labeler: Labeler, call: Call) -> list[Label]:
    """Where sizes are fixed, equal parts stay equal (the same index of each goes), and unequal ones are pinned."""
    x = call.arg(0)
    num_parts = len(value_of(call.node))
    if call.name == "unbind":
        dim = call.arg(1, "dim", 0) % len(call.shape(x))
        label = labeler.pinned(call.label(x), [dim])
        return [tuple(factor.squeeze(dim) for factor in label)] * num_parts
    dim = call.arg(2, "dim", 0) % len(call.shape(x))
    sizes = [value.shape[dim] for value in value_of(call.node)]
    if labeler.rewrites:
        ends = np.cumsum(sizes)
        return [part(labeler, call.label(x), dim, np.arange(e - s, e)) for s, e in zip(sizes, ends, strict=True)]
    if len(set(sizes)) > 1:
        return [labeler.pinned(call.label(x), [dim])] * num_parts
    parts = _parts(call.label(x), dim, sizes)
    for other in parts[1:]:
        for left, right in zip(parts[0], other, strict=True):
            labeler.units.unite(left, right)
    return [labeler.tidy(label) for label in parts]


def _parts(label: Label, dim: int, sizes: list[int]) -> list[Label]:
    ends = np.cumsum(sizes)
    return [
        tuple(f.take(np.arange(end - size, end), dim) if varies(f, dim) else f for f in label)
        for size, end in zip(sizes, ends, strict=True)
    ]


@rule("cat", "stack", "concat")
def concatenate(labeler: Labeler, call: Call) -> Label:
    nodes = call.arg(0)
    dim = call.arg(1, "dim", 0) % len(call.shape())
    labels, shapes = [call.label(node) for node in nodes], [call.shape(node) for node in nodes]
    if call.name == "stack":
        labels = [tuple(np.expand_dims(factor, dim) for factor in label) for label in labels]
        shapes = [(*shape[:dim], 1, *shape[dim:]) for shape in shapes]
    if not any(labels):
        return NONE
    joined = _joined(labeler, labels, shapes, dim)
    # Factors that do not vary along `dim` are those of every part, and must be the same in all.
    flat = [tuple(f for f in label if not varies(f, dim)) for label in labels]
    thin = [(*shape[:dim], 1, *shape[dim + 1 :]) for shape in shapes]
    shared = labeler.broadcast(flat, thin) if any(flat) and not joined else NONE
    if joined and any(flat):
        for label in flat:
            labeler.freeze(label)
    return labeler.tidy([*joined, *shared])


def _joined(labeler: Labeler, labels: list[Label], shapes: list[tuple[int, ...]], dim: int) -> list[Factor]:
    """One factor that runs through all parts along `dim`; parts without units there are frozen."""
    holders = [[factor for factor in label if varies(factor, dim)] for label in labels]
    if not any(holders):
        return []
    parts: list[Factor] = []
    for factors, shape in zip(holders, shapes, strict=True):
        for factor in factors:
            labeler.units.unite(factors[0], factor)
        frozen = np.zeros([1] * dim + [shape[dim]] + [1] * (len(shape) - dim - 1), dtype=np.int64)
        parts.append(factors[0] if factors else frozen)
    others = [np.max([part.shape[d] for part in parts]) for d in range(parts[0].ndim)]
    return [np.concatenate([_spread(part, others, dim) for part in parts], axis=dim)]


def _spread(part: Factor, sizes: list[int], dim: int) -> Factor:
    return np.broadcast_to(part, [part.shape[d] if d == dim else size for d, size in enumerate(sizes)])


@rule("getitem")
def getitem(labeler: Labeler, call: Call) -> Label:
    return call.labels[call.arg(0)][call.arg(1)]


@rule("constant_pad_nd", "pad")
def pad(labeler: Labeler, call: Call) -> Label:
    """Padded places stay apart from each other if what is added counts as units, too; otherwise they are pinned."""
    x, amounts = call.arg(0), list(call.arg(1))
    label = call.label(x)
    shape = call.shape(x)
    constant = call.name == "constant_pad_nd" or call.arg(2, "mode", "constant") == "constant"
    for index in range(0, len(amounts), 2):
        dim, (before, after) = len(shape) - 1 - index // 2, amounts[index : index + 2]
        if before == after == 0 or not any(varies(factor, dim) for factor in label):
            continue
        if not constant or not labeler.rewrites or not all(isinstance(a, int) and a >= 0 for a in (before, after)):
            label = labeler.pinned(label, [dim])
            continue
        label = tuple(
            np.concatenate([_more(labeler, f, dim, before), f, _more(labeler, f, dim, after)], dim)
            if alone(f, dim)
            else labeler.pin(f, [dim])
            for f in label
        )
    return labeler.tidy(label)


def _more(labeler: Labeler, factor: Factor, dim: int, count: int) -> Factor:
    return labeler.units.new(count).reshape([count if d == dim else 1 for d in range(factor.ndim)])


@rule("index")
def index(labeler: Labeler, call: Call) -> Label:
    """Dimensions that are indexed stay; the others go on, beside or around those of the indices."""
    x, indices = call.arg(0), list(call.arg(1))
    shape = call.shape(x)
    indexed = [dim for dim, value in enumerate(indices) if value is not None]
    for dim in indexed:
        if isinstance(indices[dim], Node):
            labeler.freeze(call.label(indices[dim]))
    if any(value_of(indices[dim]).dtype == torch.bool for dim in indexed):
        raise UnknownOperation("places that depend on values")
    label = labeler.pinned(call.label(x), indexed)
    wide = len(call.shape()) - (len(shape) - len(indexed))  # dimensions of the indices
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0
    others = [dim for dim in range(len(shape)) if dim not in indexed]
    before = [dim for dim in others if dim < first] if together else []
    result = []
    for factor in label:
        sizes = [factor.shape[dim] for dim in others]
        result.append(factor.reshape([*sizes[: len(before)], *[1] * wide, *sizes[len(before) :]]))
    return labeler.tidy(result)


@rule("masked_scatter")
def masked_scatter(labeler: Labeler, call: Call) -> Label:
    """Whole rows stand in place of others: the same index of both goes. What tells which rows is fixed."""
    x, mask, rows = call.arg(0), call.arg(1), call.arg(2)
    wide, size = len(call.shape(x)), call.shape(x)[-1]
    if call.shape(mask)[-1] != 1 or call.shape(rows)[-1] != size:
        raise UnknownOperation("numbers of a row that are told apart")
    source = labeler.pinned(call.label(rows), range(len(call.shape(rows)) - 1))
    ends = tuple(factor.reshape([1] * (wide - 1) + [-1]) for factor in source)
    x_label = labeler.pinned(call.label(x), range(wide - 1))
    return labeler.broadcast([x_label, ends], [call.shape(x), [1] * (wide - 1) + [size]])


@rule("index_select")
def index_select(labeler: Labeler, call: Call) -> Label:
    return labeler.pinned(call.label(call.arg(0)), [call.arg(1) % len(call.shape())])


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def pixels(labeler: Labeler, call: Call) -> Label:
    """Channels become places (those of one result go together), places channels, or channels change their order."""
    x, count = call.arg(0), call.arg(1)
    shape = call.shape(x)
    if len(shape) != 4:
        raise UnknownOperation("without a batch")
    label = labeler.pinned(call.label(x), [2, 3])
    n, c, h, w = shape
    if call.name == "pixel_unshuffle":
        return tuple(factor.repeat(count * count, 1) if varies(factor, 1) else factor for factor in label)
    if call.name == "pixel_shuffle":
        grid = labeler.reshape(label, shape, [n, c // count**2, count**2, h, w])
        grid = tuple(factor.squeeze(2) for factor in labeler.pinned(grid, [2]))
        return tuple(np.broadcast_to(f, [*f.shape[:2], 1, 1]) for f in grid)
    grid = labeler.reshape(label, shape, [n, count, c // count, h, w])
    turned = tuple(factor.swapaxes(1, 2) for factor in grid)
    return labeler.reshape(turned, [n, c // count, count, h, w], shape)


@rule("glu")
def glu(labeler: Labeler, call: Call) -> Label:
    """The same index of both halves goes."""
    x = call.arg(0)
    dim = call.arg(1, "dim", -1) % len(call.shape(x))
    size = call.shape()[dim]
    first, second = _parts(call.label(x), dim, [size, size])
    for left, right in zip(first, second, strict=True):
        labeler.units.unite(left, right)
    return labeler.tidy(first)


@rule("roll", "flip")
def shuffle(labeler: Labeler, call: Call) -> Label:
    dims = [dim % len(call.shape()) for dim in (call.arg(2) if call.name == "roll" else call.arg(1))]
    return labeler.pinned(call.label(call.arg(0)), dims)
