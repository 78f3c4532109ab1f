"""A graph whose operators write into no argument: each in-place operator becomes its namesake that makes a new tensor.

Only where nothing else can see the memory that was written to; elsewhere (a slice that is assigned to) torch's own
functionalization takes over, which knows views."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

_OF_MEMORY = ("alias", "detach", "lift_fresh", "lift_fresh_copy")
"""Operators that return what they are given; nothing is trained through a detached constant of a network."""

_MAYBE_VIEWS = (
    "reshape",
    "flatten",
    "contiguous",
    "to",
    "unflatten",
    "dropout",
    "type_as",
    "float",
    "chunk",
    "view_as",
)
"""Composites that may return a view though their schema does not say so."""


class SeenElsewhereError(Exception):
    """An in-place operator writes to memory that another result shows, too."""


def writes(node: Node) -> bool:
    """Whether the operator changes one of its arguments, statistics of batch norms aside."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def make_functional(graph: Graph) -> None:
    """Replace every in-place operator of `graph`, in place.

    Raises:
        SeenElsewhereError: one cannot be replaced so; the graph may be half done.
    """
    views = _views(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    memory: dict[Node, list[Node]] = defaultdict(list)
    for node in cast(list[Node], list(graph.nodes)):
        memory[views.get(node, node)].append(node)
    replaced: dict[Node, Node] = {}  # what later operators read instead
    for node in list(graph.nodes):
        for old in list(node.all_input_nodes):
            new = old
            while new in replaced:
                new = replaced[new]
            if new is not old:
                node.replace_input_with(old, new)
        if not writes(node):
            continue
        written = node.args[0]
        functional = _namesake(node)
        if not isinstance(written, Node) or functional is None:
            raise SeenElsewhereError(str(node.target))
        shared = [other for other in memory[views.get(written, written)] if other is not written]
        if any(places[user] > places[node] for other in shared if places[other] < places[node] for user in other.users):
            raise SeenElsewhereError(str(node.target))
        node.target = functional
        replaced[written] = node


def tidy(graph: Graph) -> None:
    """Drop checks, copies that change nothing, and results that nobody reads."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if name.startswith(("_assert", "sym_constrain_range")) or node.target.namespace == "profiler":
            graph.erase_node(node)
        elif name == "_native_batch_norm_legit_no_training":
            _whole_batch_norm(graph, node)
        elif name == "zero":  # what `zero_` becomes; nothing else computes it
            node.target = torch.ops.aten.zeros_like.default
        elif name in _OF_MEMORY:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    graph.lint()


def _whole_batch_norm(graph: Graph, node: Node) -> None:
    """As the operator that can be trained, too."""
    *arguments, momentum, eps = node.args
    with graph.inserting_after(node):
        whole = graph.call_function(torch.ops.aten.batch_norm.default, (*arguments, False, momentum, eps, True))
    for user in list(node.users):
        assert user.target is operator.getitem
        if user.args[1] == 0:
            user.replace_all_uses_with(whole)
            whole.meta = dict(user.meta)
        graph.erase_node(user)
    graph.erase_node(node)


def _namesake(node: Node) -> Any:
    """The operator that computes the same and writes nothing: `add_.Tensor` → `add.Tensor`."""
    target: Any = node.target
    name = target._schema.name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if packet is None or target._overloadname not in packet.overloads():
        return None
    functional = getattr(packet, target._overloadname)
    same = [str(argument.type) for argument in functional._schema.arguments]
    return functional if same == [str(argument.type) for argument in target._schema.arguments] else None


def _views(graph: Graph) -> dict[Node, Node]:
    """Each result that may share memory with another one → the result whose memory it is."""
    origin: dict[Node, Node] = {}
    for node in cast(list[Node], list(graph.nodes)):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            continue
        target, source = node.target, node.args[0]
        shares = not isinstance(target, torch._ops.OpOverload)
        if isinstance(target, torch._ops.OpOverload):
            shares = any(result.alias_info is not None for result in target._schema.returns)
            shares |= target._schema.name.removeprefix("aten::") in _MAYBE_VIEWS
        if shares and isinstance(source.meta.get("val"), (Tensor, list, tuple)):
            origin[node] = origin.get(source, source)
    return origin
