"""A graph without some of its units: weights lose slices, and sizes that stand in operators follow.

What stays of each result is read from its label. A size in the source that counted what left (heads in a view, channels
of a split, groups of a depthwise convolution) is counted anew; a number that only came from a size, such as the scale
of attention, stays that of the whole network.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.node import map_arg

from penjing.compress.prune.graph import Analysis, place_of
from penjing.compress.prune.labels import Label, varies
from penjing.compress.prune.rules import Call
from penjing.compress.prune.rules_layers import convolution_groups
from penjing.compress.prune.rules_shape import slice_of
from penjing.compress.prune.surgery import Selection, cuts_of
from penjing.core.graph.network import GraphModule, operator_name, set_tensor, tensor_at

Kept = dict[int, np.ndarray]  # dimension → indices that stay, of dimensions that get shorter


class Unfit(Exception):  # noqa: N818  (the caller keeps the units that are to blame, or refuses)
    """Units cannot leave: the node where that shows, and why."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.name} = {node.target} in {place_of(node)}: {reason}")
        self.node = node


@dataclass(frozen=True)
class Rewritten:
    """A graph without the units of a selection.

    Attributes:
        module: shares the tensors that lost nothing with the given graph.
        nodes: node of the given graph → the one that takes its place.
        kept: what stays of each result of the given graph; of several results, of each.
    """

    module: GraphModule
    nodes: dict[Node, Node]
    kept: Mapping[Node, Any]


def rewritten(module: fx.GraphModule, analysis: Analysis, selection: Selection) -> Rewritten:
    """`module` without the units of `selection`; it is left as it is.

    Args:
        analysis: of `module`.

    Raises:
        Unfit: what would stay of a result is no tensor, or nothing.
        InputError: a dimension of a weight would vanish.
    """
    gone = gone_units(analysis, selection)
    nodes = cast(list[Node], list(module.graph.nodes))
    kept = {node: _kept_of(analysis, node, gone) for node in nodes if node in analysis.labels}
    shapes = {name: tuple(tensor_at(module, name).shape) for name in analysis.held}
    cuts = cuts_of(selection, shapes)
    writer = _Writer(kept)
    root = nn.Module()
    for node in nodes:
        writer.add(node)
        if node.op == "get_attr":
            name = str(node.target)
            tensor = tensor_at(module, name)
            if name in cuts:
                short = cuts[name].of(tensor.detach())
                tensor = nn.Parameter(short, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else short
            if not any(other.target == name for other in writer.weights):
                set_tensor(root, name, tensor)
            writer.weights.append(writer.nodes[node])
    writer.graph.lint()
    result = GraphModule(root, writer.graph)
    result.train(module.training)
    return Rewritten(result, writer.nodes, kept)


def gone_units(analysis: Analysis, selection: Selection) -> np.ndarray:
    """The units of the labels of `analysis` that leave with `selection`, ascending."""
    roots = []
    for group, units in selection:
        place = group.places[0]
        (factor,) = (f for f in analysis.held[place.tensor] if varies(f, place.dim))
        flat = analysis.labeler.units.find(factor).reshape(-1)
        roots += [flat[group.units[unit][0]] for unit in units]
    return np.unique(np.concatenate(roots)) if roots else np.zeros(0, np.int64)


def is_gone(analysis: Analysis, label: Any, gone: np.ndarray) -> bool:
    """Whether anything of a label leaves."""
    parts = label if isinstance(label, list) else [label]
    return any(np.isin(analysis.labeler.units.find(factor), gone).any() for part in parts for factor in part)


def _kept_of(analysis: Analysis, node: Node, gone: np.ndarray) -> Any:
    label, value = analysis.labels[node], cast(Any, node.meta.get("val"))
    if isinstance(label, list):
        return [_kept(analysis, node, part, gone, val.shape) for part, val in zip(label, value, strict=True)]
    return _kept(analysis, node, label, gone, value.shape) if isinstance(value, Tensor) else {}


def _kept(analysis: Analysis, node: Node, label: Label, gone: np.ndarray, shape: tuple[int, ...]) -> Kept:
    lost: dict[int, np.ndarray] = {}
    for factor in label:
        mask = np.isin(analysis.labeler.units.find(factor), gone)
        if not mask.any():
            continue
        rows = np.zeros_like(mask)
        for dim in range(mask.ndim):
            if varies(mask, dim):
                row = mask.all(axis=tuple(other for other in range(mask.ndim) if other != dim), keepdims=True)
                rows |= row
                lost[dim] = lost.get(dim, False) | row.reshape(-1)
        if (rows != mask).any():
            raise Unfit(node, "what leaves is no whole row of it")
    kept = {dim: np.flatnonzero(~flags) for dim, flags in lost.items() if flags.any()}
    for dim, indices in kept.items():
        if not indices.size:
            raise Unfit(node, f"nothing stays of its dimension {dim}")
        assert len(lost[dim]) == shape[dim], (node, dim)
    return kept


class _Writer:
    """Copies a graph node by node, with sizes that fit what stays."""

    def __init__(self, kept: Mapping[Node, Any]) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[Node, Node] = {}
        self.weights: list[Node] = []
        self._kept = kept

    def add(self, node: Node) -> None:
        """Copy `node`."""
        new = self.graph.node_copy(node, self.nodes.__getitem__)
        new.meta = dict(node.meta)
        self.nodes[node] = new
        name = operator_name(node)
        if name == "sym_size":
            self.nodes[node] = self._whole_size(node, new)
        elif name in _REWRITES and (self.lost(node) or any(self.lost(given) for given in node.all_input_nodes)):
            _REWRITES[name](self, node, new)

    def lost(self, node: Any) -> bool:
        """Whether a result gets shorter anywhere."""
        kept = self._kept.get(node)
        return any(kept) if isinstance(kept, list) else bool(kept)

    def kept(self, node: Node, dim: int, index: int | None = None) -> np.ndarray:
        """The indices of a dimension of a result (of the result `index` of several) that stay."""
        kept = self._kept[node] if index is None else self._kept[node][index]
        value = node.meta["val"] if index is None else node.meta["val"][index]
        return kept.get(dim, np.arange(value.shape[dim]))

    def size(self, node: Node, dim: int, index: int | None = None) -> int:
        """The new size of a dimension of a result."""
        return len(self.kept(node, dim, index))

    def sizes(self, node: Node, given: Any, first: int = 0) -> list[Any]:
        """`given`, which says sizes of the result's dimensions from `first` on, for what stays."""
        result = []
        for offset, old in enumerate(given):
            dim, size = first + offset, self._mapped(old)
            whole, short = node.meta["val"].shape[dim], self.size(node, dim)
            if whole == short or (isinstance(old, int) and old == -1):
                result.append(size)
            elif isinstance(old, int):
                result.append(short)
            else:
                result.append(self._scaled(size, short, whole))
        return result

    def _mapped(self, value: Any) -> Any:
        return map_arg(value, self.nodes.__getitem__)

    def _scaled(self, size: Node, numerator: int, denominator: int) -> Node:
        """A size that is computed when the graph runs, × numerator / denominator, which goes without a rest."""
        common = math.gcd(numerator, denominator)
        numerator, denominator = numerator // common, denominator // common
        last = next(reversed(self.graph.nodes))  # the node that is being rewritten
        with self.graph.inserting_before(last):
            if numerator > 1:
                size = self.graph.call_function(operator.mul, (size, numerator))
            if denominator > 1:
                size = self.graph.call_function(operator.floordiv, (size, denominator))
        return size

    def _whole_size(self, node: Node, new: Node) -> Node:
        """Sizes are computed with as those of the whole network; only where they are used, they fit what stays."""
        given, dim = cast(Node, node.args[0]), cast(int, node.args[1])
        whole = given.meta["val"].shape[dim]
        short = self.size(given, dim % given.meta["val"].ndim)
        if whole == short:
            return new
        common = math.gcd(whole, short)
        for function, factor in ((operator.mul, whole // common), (operator.floordiv, short // common)):
            if factor > 1:
                new = self.graph.call_function(function, (new, factor))
        return new


_Rewrite = Callable[[_Writer, Node, Node], None]
_REWRITES: dict[str, _Rewrite] = {}


def _rewrite(*names: str) -> Callable[[_Rewrite], _Rewrite]:
    def register(function: _Rewrite) -> _Rewrite:
        _REWRITES.update(dict.fromkeys(names, function))
        return function

    return register


def _call(node: Node) -> Call:
    return Call(operator_name(node), node, {})


def _set(node: Node, position: int, name: str, value: Any) -> None:
    """Put an argument where it was given, or by position where it was left out at the end."""
    if name in node.kwargs:
        node.update_kwarg(name, value)
    else:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])


@_rewrite("view", "reshape", "_unsafe_view", "expand", "broadcast_to", "new_zeros", "new_ones", "new_full", "new_empty")
def _sizes_second(writer: _Writer, node: Node, new: Node) -> None:
    _set(new, 1, "size", writer.sizes(node, _call(node).arg(1, "size")))


@_rewrite("zeros", "ones", "full", "empty")
def _sizes_first(writer: _Writer, node: Node, new: Node) -> None:
    _set(new, 0, "size", writer.sizes(node, _call(node).arg(0, "size")))


@_rewrite("unflatten")
def _unflatten(writer: _Writer, node: Node, new: Node) -> None:
    dim = _call(node).arg(1) % cast(Node, node.args[0]).meta["val"].ndim
    _set(new, 2, "sizes", writer.sizes(node, _call(node).arg(2), dim))


@_rewrite("split", "split_with_sizes", "chunk", "tensor_split")
def _split(writer: _Writer, node: Node, new: Node) -> None:
    dim = _call(node).arg(2, "dim", 0)
    positive = dim % cast(Node, node.args[0]).meta["val"].ndim
    sizes = [writer.size(node, positive, index) for index in range(len(node.meta["val"]))]
    new.target = torch.ops.aten.split_with_sizes.default
    new.args, new.kwargs = (new.args[0], sizes, dim), {}


@_rewrite("slice", "narrow")
def _slice(writer: _Writer, node: Node, new: Node) -> None:
    call, given = _call(node), cast(Node, node.args[0])
    dim = call.arg(1, "dim", 0)
    positive = dim % given.meta["val"].ndim
    places = slice_of(call)
    stays = writer.kept(given, positive)
    if len(stays) == given.meta["val"].shape[positive]:
        return
    if places is None or places.step != 1:
        raise Unfit(node, "its places cannot be counted anew")
    start, stop = (int(np.searchsorted(stays, place)) for place in (places.start, places.stop))
    new.target = torch.ops.aten.slice.Tensor
    new.args, new.kwargs = (new.args[0], dim, start, stop), {}


@_rewrite("constant_pad_nd", "pad")
def _pad(writer: _Writer, node: Node, new: Node) -> None:
    amounts = list(_call(node).arg(1))
    rank = node.meta["val"].ndim
    for index in range(0, len(amounts), 2):
        dim, before = rank - 1 - index // 2, amounts[index]
        whole, stays = node.meta["val"].shape[dim], writer.kept(node, dim)
        if len(stays) < whole:
            inner = cast(Node, node.args[0]).meta["val"].shape[dim]
            amounts[index] = int((stays < before).sum())
            amounts[index + 1] = int((stays >= before + inner).sum())
    _set(new, 1, "pad", map_arg(amounts, writer.nodes.__getitem__))


@_rewrite("repeat_interleave")
def _repeat_interleave(writer: _Writer, node: Node, new: Node) -> None:
    if "output_size" in new.kwargs:
        new.kwargs = {key: value for key, value in new.kwargs.items() if key != "output_size"}


@_rewrite("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def _groups(writer: _Writer, node: Node, new: Node) -> None:
    groups, given = convolution_groups(_call(node)), cast(Node, node.args[0])
    if groups == 1 or groups != given.meta["val"].shape[1]:
        return  # one group, or groups of which each loses the same
    _set(new, 8 if operator_name(node) == "convolution" else 6, "groups", writer.size(given, 1))


@_rewrite("group_norm")
def _group_norm(writer: _Writer, node: Node, new: Node) -> None:
    given = cast(Node, node.args[0])
    if node.args[1] == given.meta["val"].shape[1]:
        _set(new, 1, "num_groups", writer.size(given, 1))


@_rewrite("native_group_norm")
def _native_group_norm(writer: _Writer, node: Node, new: Node) -> None:
    given = cast(Node, node.args[0])
    if node.args[6] == given.meta["val"].shape[1]:
        new.update_arg(6, writer.size(given, 1))
    new.update_arg(4, writer.size(given, 1))


@_rewrite("layer_norm", "native_layer_norm", "rms_norm")
def _normalized(writer: _Writer, node: Node, new: Node) -> None:
    given, shape = cast(Node, node.args[0]), cast(list[int], node.args[1])
    rank = given.meta["val"].ndim
    new.update_arg(1, [writer.size(given, dim) for dim in range(rank - len(shape), rank)])


@_rewrite("scaled_dot_product_attention")
def _scale(writer: _Writer, node: Node, new: Node) -> None:
    queries = cast(Node, node.args[0])
    width = queries.meta["val"].shape[-1]
    if node.kwargs.get("scale") is None and writer.size(queries, queries.meta["val"].ndim - 1) != width:
        new.update_kwarg("scale", width**-0.5)
