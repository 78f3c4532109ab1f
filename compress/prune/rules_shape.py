"""What moving elements about does to labels: views, permutations, slices, concatenations."""

from __future__ import annotations

import numpy as np

from penjing.compress.prune.labels import NONE, Factor, Label, Labeler, split_with, varies
from penjing.compress.prune.rules import Call, UnknownOperation, rule, value_of


@rule("view", "reshape", "flatten", "unflatten", "_unsafe_view", "unsqueeze", "squeeze", "view_as")
def reshape(labeler: Labeler, call: Call) -> Label:
    """A part of a dimension whose size stands in the code beside an open one (−1) cannot shrink: it is pinned."""
    x = call.arg(0)
    label = labeler.reshape(call.label(x), call.shape(x), call.shape())
    sizes = call.arg(2 if call.name == "unflatten" else 1)
    if not isinstance(sizes, list | tuple) or -1 not in sizes:
        return label
    first = call.arg(1) % len(call.shape(x)) if call.name == "unflatten" else 0
    open_dim = first + list(sizes).index(-1)
    fixed = [dim for dim in split_with(open_dim, call.shape(x), call.shape()) if dim != open_dim]
    return labeler.pinned(label, fixed)


@rule("permute", "transpose", "t", "numpy_T", "movedim", "swapaxes")
def permute(labeler: Labeler, call: Call) -> Label:
    num_dims = len(call.shape())
    if call.name == "permute":
        order = [dim % num_dims for dim in call.arg(1)]
    elif call.name in ("transpose", "swapaxes"):
        order = list(range(num_dims))
        first, second = call.arg(1) % num_dims, call.arg(2) % num_dims
        order[first], order[second] = second, first
    elif call.name == "movedim":
        source, target = call.arg(1), call.arg(2)
        moved = np.moveaxis(np.empty(range(2, 2 + num_dims)), source, target).shape
        order = [size - 2 for size in moved]
    else:
        order = list(range(num_dims))[::-1]
    return tuple(factor.transpose(order) for factor in call.label(call.arg(0)))


@rule("expand", "expand_as", "broadcast_to")
def expand(labeler: Labeler, call: Call) -> Label:
    missing = len(call.shape()) - len(call.shape(call.arg(0)))
    return tuple(factor.reshape((1,) * missing + factor.shape) for factor in call.label(call.arg(0)))


@rule("repeat_interleave")
def repeat_interleave(labeler: Labeler, call: Call) -> Label:
    x, repeats, dim = call.arg(0), call.arg(1), call.arg(2, "dim")
    if not isinstance(repeats, int) or dim is None:
        raise UnknownOperation("repeats that differ, or without a dimension")
    return tuple(f.repeat(repeats, dim) if varies(f, dim % len(call.shape(x))) else f for f in call.label(x))


@rule("slice", "narrow", "select")
def slices(labeler: Labeler, call: Call) -> Label:
    """Places are counted from the start, so that none before them may go: the dimension is pinned."""
    x = call.arg(0)
    dim = call.arg(1, "dim", 0) % len(call.shape(x))
    label = call.label(x)
    if call.shape() != call.shape(x):
        label = labeler.pinned(label, [dim])
    return tuple(factor.squeeze(dim) for factor in label) if call.name == "select" else label


@rule("split", "split_with_sizes", "chunk", "unbind", "tensor_split")
def split(labeler: Labeler, call: Call) -> list[Label]:
    """Equal parts stay equal: the same index of each goes. Unequal ones are counted, and pinned."""
    x = call.arg(0)
    num_parts = len(value_of(call.node))
    if call.name == "unbind":
        dim = call.arg(1, "dim", 0) % len(call.shape(x))
        label = labeler.pinned(call.label(x), [dim])
        return [tuple(factor.squeeze(dim) for factor in label)] * num_parts
    dim = call.arg(2, "dim", 0) % len(call.shape(x))
    sizes = [value.shape[dim] for value in value_of(call.node)]
    if len(set(sizes)) > 1:
        return [labeler.pinned(call.label(x), [dim])] * num_parts
    parts = _parts(call.label(x), dim, sizes)
    for part in parts[1:]:
        for first, other in zip(parts[0], part, strict=True):
            labeler.units.unite(first, other)
    return [labeler.tidy(part) for part in parts]


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


@rule("roll", "flip")
def shuffle(labeler: Labeler, call: Call) -> Label:
    dims = [dim % len(call.shape()) for dim in (call.arg(2) if call.name == "roll" else call.arg(1))]
    return labeler.pinned(call.label(call.arg(0)), dims)
