"""What layers do to labels: products, convolutions, norms, embeddings, attention."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.fx import Node

from penjing.compress.prune.labels import NONE, Label, Labeler, along, varies
from penjing.compress.prune.rules import Call, UnknownOperation, num_results, rule, tensors_of


@rule("linear", "addmm", "baddbmm", "mm", "matmul", "bmm")
def product(labeler: Labeler, call: Call) -> Label:
    name = call.name
    if name in ("addmm", "baddbmm"):
        bias, left, right = (call.arg(index) for index in range(3))
    else:
        left, right, bias = call.arg(0), call.arg(1), call.arg(2, "bias") if name == "linear" else None
    a_shape, b_shape = list(call.shape(left)), list(call.shape(right))
    a, b = call.label(left), call.label(right)
    if name == "linear":  # x (…, K) · W (N, K)
        b, b_shape = tuple(factor.swapaxes(0, 1) for factor in b), b_shape[::-1]
    if min(len(a_shape), len(b_shape)) < 2:
        raise UnknownOperation("a product with a vector")
    a = tuple(factor[..., np.newaxis] for factor in a)  # in the common index space (…, M, K, N)
    b = tuple(np.expand_dims(factor, -3) for factor in b)
    shapes = [[*a_shape, 1], [*b_shape[:-2], 1, *b_shape[-2:]]]
    out = labeler.contract([a, b], shapes, [max(map(len, shapes)) - 2])
    out = tuple(factor.squeeze(-2) for factor in out)
    if isinstance(bias, Node):
        out = labeler.broadcast([out, call.label(bias)], [call.shape(), call.shape(bias)])
    return out


@rule("einsum")
def einsum(labeler: Labeler, call: Call) -> Label:
    """A product over a common index space: the letters of the equation."""
    equation, nodes = call.arg(0).replace(" ", ""), call.arg(1)
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow or "." in equation or any(len(set(term)) < len(term) for term in [*terms, output]):
        raise UnknownOperation(f"the equation {equation}")
    letters = output + "".join(sorted(set(inputs) - {",", *output}))
    labels, shapes = [], []
    for term, node in zip(terms, nodes, strict=True):
        order = sorted(range(len(term)), key=lambda axis: letters.index(term[axis]))
        shape = [1] * len(letters)
        for axis in order:
            shape[letters.index(term[axis])] = call.shape(node)[axis]
        spread = [tuple(axis for axis, letter in enumerate(letters) if letter not in term)]
        labels.append(tuple(np.expand_dims(factor.transpose(order), spread[0]) for factor in call.label(node)))
        shapes.append(shape)
    summed = tuple(range(len(output), len(letters)))
    return tuple(factor.squeeze(summed) for factor in labeler.contract(labels, shapes, summed))


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(labeler: Labeler, call: Call) -> Label:
    x, weight, bias = call.arg(0), call.arg(1), call.arg(2, "bias")
    transposed = call.arg(6, default=False) if call.name == "convolution" else "transpose" in call.name
    groups = convolution_groups(call)
    num_dims = len(call.shape(x))
    if num_dims != len(call.shape(weight)):
        raise UnknownOperation("without a batch")
    spatial = list(range(2, num_dims))
    inputs = labeler.pinned(call.label(x), spatial)
    in_units = _channels(labeler, inputs, call.shape(x)[1])
    first, second, *kernel = (_dim_units(labeler, call, weight, dim) for dim in range(num_dims))
    for units in kernel:
        labeler.units.freeze(units)
    out_units, per_group = (second, first) if transposed else (first, second)
    if groups == 1:
        labeler.units.unite(per_group, in_units)
    elif transposed:
        labeler.units.unite(per_group, in_units)
        columns = per_group.reshape(groups, -1)
        if columns.shape[1] == 1 and out_units.size == 1:  # depthwise
            out_units = in_units
        else:  # every group loses the same channels, of its inputs and of its outputs
            if columns.shape[1] > 1:
                labeler.units.unite(columns, columns[:1])
            else:
                labeler.units.freeze(columns)
            out_units = np.tile(out_units, groups)
    elif per_group.size == 1:  # depthwise: each output belongs to one input channel
        labeler.units.unite(out_units.reshape(groups, -1), in_units.reshape(groups, 1))
    else:  # every group loses the same channels
        labeler.units.unite(in_units.reshape(groups, -1), per_group.reshape(1, -1))
        columns = out_units.reshape(groups, -1)
        labeler.units.unite(columns, columns[:1])
    if isinstance(bias, Node):
        labeler.units.unite(out_units, _dim_units(labeler, call, bias, 0))
    return labeler.tidy([along(labeler.units.find(out_units), 1, num_dims)])


def convolution_groups(call: Call) -> int:
    """The groups of a convolution."""
    return call.arg(8 if call.name == "convolution" else 6, "groups", 1)


def _channels(labeler: Labeler, label: Label, size: int) -> np.ndarray:
    """The units (size,) along dimension 1; frozen ones where there are none."""
    units = np.zeros(size, dtype=np.int64)
    holders = [factor for factor in label if varies(factor, 1)]
    for factor in holders:
        labeler.units.unite(holders[0], factor)
        units = labeler.units.find(holders[0]).max(axis=tuple(d for d in range(factor.ndim) if d != 1))
    return units


def _dim_units(labeler: Labeler, call: Call, weight: Node, dim: int) -> np.ndarray:
    """The units along one dimension of a weight; one frozen unit where it has none."""
    size = call.shape(weight)[dim]
    for factor in call.label(weight):
        if varies(factor, dim):
            return labeler.units.find(factor).reshape(size)
    return np.zeros(size, dtype=np.int64)


@rule("batch_norm", "instance_norm")
def batch_norm(labeler: Labeler, call: Call) -> Label:
    x = call.arg(0)
    num_dims = len(call.shape(x))
    label = labeler.pinned(call.label(x), range(2, num_dims))
    labels, shapes = [label], [call.shape(x)]
    for index in range(1, 5):
        if isinstance(argument := call.arg(index), Node):
            labels.append(tuple(along(factor.reshape(-1), 1, num_dims) for factor in call.label(argument)))
            shapes.append((1, call.shape(argument)[0], *(1,) * (num_dims - 2)))
    return labeler.broadcast(labels, shapes)


@rule("layer_norm", "rms_norm", "native_layer_norm")
def layer_norm(labeler: Labeler, call: Call) -> Any:
    nodes = tensors_of(call.node.args)
    label = labeler.broadcast([call.label(node) for node in nodes], [call.shape(node) for node in nodes])
    return label if num_results(call) is None else [label, NONE, NONE]


@rule("group_norm", "native_group_norm")
def group_norm(labeler: Labeler, call: Call) -> Any:
    native = call.name == "native_group_norm"
    x, groups = call.arg(0), call.arg(6 if native else 1)
    shape = call.shape(x)
    label = labeler.pinned(call.label(x), range(2, len(shape)))
    if groups > 1 and (groups < shape[1] or not labeler.rewrites):  # every group loses the same channels
        columns = _channels(labeler, label, shape[1]).reshape(groups, -1)
        labeler.units.unite(columns, columns[:1])
    labels, shapes = [label], [shape]
    for argument in (call.arg(1), call.arg(2)) if native else (call.arg(2), call.arg(3)):
        if isinstance(argument, Node):
            labels.append(tuple(along(factor.reshape(-1), 1, len(shape)) for factor in call.label(argument)))
            shapes.append((1, shape[1], *(1,) * (len(shape) - 2)))
    label = labeler.broadcast(labels, shapes)
    return [label, NONE, NONE] if native else label


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(labeler: Labeler, call: Call) -> Any:
    raise UnknownOperation("a recurrent layer keeps its widths")


@rule("embedding")
def embedding(labeler: Labeler, call: Call) -> Label:
    table = call.arg(0)
    labeler.units.freeze(_dim_units(labeler, call, table, 0))  # token ids are meaning
    units = _dim_units(labeler, call, table, 1)
    return labeler.tidy([along(units, len(call.shape()) - 1, len(call.shape()))])


@rule("scaled_dot_product_attention")
def attention(labeler: Labeler, call: Call) -> Label:
    q, k, v = (call.arg(index) for index in range(3))
    labels, shapes = [], []
    for node in (q, k, v):
        label, shape = call.label(node), list(call.shape(node))
        if 1 < shape[-3] < call.shape(q)[-3]:  # grouped heads; one for all of them broadcasts
            repeat = call.shape(q)[-3] // shape[-3]
            label = tuple(f.repeat(repeat, -3) if varies(f, f.ndim - 3) else f for f in label)
            shape[-3] = call.shape(q)[-3]
        labels.append(labeler.pinned(label, [len(shape) - 2]))
        shapes.append(shape)
    last = len(shapes[0]) - 1
    squeezed = [[*shape[:-2], 1, shape[-1]] for shape in shapes]
    scores = labeler.contract(labels[:2], squeezed[:2], [last])
    mask = call.arg(3, "attn_mask")
    if isinstance(mask, Node) and call.label(mask):
        wide = call.shape(mask)
        label = labeler.pinned(call.label(mask), [len(wide) - 2, len(wide) - 1])
        scores = labeler.broadcast([scores, label], [[*squeezed[0][:-1], 1], [*wide[:-2], 1, 1]])
    return labeler.broadcast([scores, labels[2]], [[*squeezed[0][:-1], 1], squeezed[2]])
