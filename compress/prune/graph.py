"""The dependency graph: which slices of which weights can leave a network, and what has to leave with them.

The network is a graph of ATen operators, or becomes one by `torch.export` with example inputs. Labels run through it
once (see labels.py), and units that touch the same dimensions of the same weights form a group. The idea of coupled
groups is that of DepGraph (Fang et al., https://arxiv.org/abs/2301.12900); here indices run forward through every
operation, and what flows through an operation without a rule stays whole.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.fx import Node

from penjing.compress.prune import rules_layers, rules_shape  # noqa: F401  (they register rules)
from penjing.compress.prune.labels import NONE, Label, Labeler
from penjing.compress.prune.rules import RULES, Call, UnknownOperation, filled
from penjing.compress.prune.units import FROZEN
from penjing.core.errors import InputError, first_line
from penjing.core.graph.network import propagate_module
from penjing.core.graph.trace import without_stacks
from penjing.core.progress import plural
from penjing.kernels.dispatch import force_torch


@dataclass(frozen=True, order=True)
class Place:
    """One dimension of one parameter or buffer."""

    tensor: str
    dim: int

    def __str__(self) -> str:
        return f"{self.tensor}[dim {self.dim}]"


@dataclass(frozen=True)
class Group:
    """Units of one kind: each takes its own indices of the same places.

    Attributes:
        places: the dimensions that get shorter together.
        units: for each unit, the indices it takes of each place, in the order of `places`.
    """

    places: tuple[Place, ...]
    units: tuple[tuple[np.ndarray, ...], ...]

    @property
    def name(self) -> str:
        """The place that tells groups apart: the first output dimension, or the first place."""
        outputs = [place for place in self.places if place.dim == 0 and place.tensor.endswith("weight")]
        return str((outputs or list(self.places))[0])

    @cached_property
    def indices_of_unit(self) -> int:
        """The fewest indices that a unit takes of a place: 1 for channels, the head size for heads."""
        return min(len(indices) for unit in self.units for indices in unit)

    def __len__(self) -> int:
        return len(self.units)

    def __str__(self) -> str:
        lines = [f"{plural(len(self), 'unit')}, each takes"]
        for index, place in enumerate(self.places):
            counts = sorted({len(unit[index]) for unit in self.units})
            lines.append(f"  {'–'.join(map(str, counts))} of {place}")
        return "\n".join(lines)


@dataclass
class DependencyGraph:
    """All groups of a network.

    Attributes:
        reasons: operations that nobody wrote a rule for, and their places: what flows through them stays whole.
    """

    groups: tuple[Group, ...]
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join(f"group {index}: {group}" for index, group in enumerate(self.groups))


@dataclass(frozen=True)
class Analysis:
    """What was found about a graph.

    Attributes:
        found: groups and what is kept.
        labels: of each node's result; a list of them for several results.
        held: of each weight by name.
    """

    found: DependencyGraph
    labeler: Labeler
    labels: dict[Node, Any]
    held: dict[str, Label]


def dependency_graph(model: nn.Module, example: tuple[Any, ...], *, protect: Iterable[str] = ()) -> DependencyGraph:
    """Analyse `model`; it is left as it is.

    Args:
        model: a graph of ATen operators, or any network that `torch.export` takes; its results are kept whole.
        example: inputs that show it; batch sizes and lengths of two or more, so that no dimension is mistaken for 1.
        protect: shell patterns of parameter names whose units stay.

    Raises:
        InputError: the network cannot be exported.
    """
    if isinstance(model, fx.GraphModule):
        return analyse(model, example, protect).found
    program = _export(model, example)
    tensors = _stored_tensors(program, model)
    names = {node: tensors.get(node.name) for node in program.graph.nodes if node.op == "placeholder"}
    return _analysed(program.graph, names, protect, Labeler()).found


def analyse(model: fx.GraphModule, example: tuple[Any, ...], protect: Iterable[str] = ()) -> Analysis:
    """Analyse a graph whose weights are attributes and whose sizes can be rewritten; see `dependency_graph`.

    Every weight and constant of floating point may lose units; whole numbers have a meaning.

    Raises:
        InputError: the graph does not run.
    """
    propagate_module(model, example)
    names = {
        node: str(node.target) if node.op == "get_attr" and node.meta["val"].is_floating_point() else None
        for node in model.graph.nodes
        if node.op in ("placeholder", "get_attr")
    }
    return _analysed(model.graph, names, protect, Labeler(rewrites=True))


def _analysed(graph: fx.Graph, names: dict[Node, str | None], protect: Iterable[str], labeler: Labeler) -> Analysis:
    """Labels run through `graph`; `names` are those of weights, None for what has no units."""
    labels: dict[Node, Any] = {}
    held: dict[str, Label] = {}
    reasons: dict[str, None] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            name = names[node]
            if name is None:
                labels[node] = NONE
                continue
            if name not in held:
                held[name] = labeler.fresh(tuple(node.meta["val"].shape))
            labels[node] = held[name]
        elif node.op == "call_function":
            labels[node], reason = _apply(labeler, node, labels)
            if reason and _any_of(labeler, node, labels, held):
                reasons[f"{node.target} in {place_of(node)} ({reason})"] = None
            if reason:
                for argument in node.all_input_nodes:
                    _freeze(labeler, labels[argument])
        elif node.op == "output":
            for result in node.all_input_nodes:
                _freeze(labeler, labels[result])
        else:
            raise InputError(f"the exported network has a {node.op} node ({node.name}), which pruning does not know")
    for name, label in held.items():
        if any(fnmatchcase(name, pattern) for pattern in protect):
            labeler.freeze(label)
    labeler.settle()
    return Analysis(_collect(labeler, held, tuple(reasons)), labeler, labels, held)


def _export(model: nn.Module, example: tuple[Any, ...]) -> Any:
    training = model.training
    model.eval()
    try:
        with force_torch(), without_stacks():
            return torch.export.export(model, example, strict=False)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be exported for analysis: {first_line(error)}; pruning needs a network "
            "whose control flow does not depend on values"
        ) from error
    finally:
        model.train(training)


def _stored_tensors(program: Any, model: nn.Module) -> dict[str, str]:
    """Placeholder → name in the model: parameters, and the statistics of batch norms. Tied ones share a name."""
    statistics = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for name in ("running_mean", "running_var")
    }
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for spec in program.graph_signature.input_specs:
        target = spec.target
        if spec.kind is InputKind.PARAMETER:
            names[spec.arg.name] = first.setdefault(id(parameters[target]), target)
        elif spec.kind is InputKind.BUFFER and target in statistics:
            names[spec.arg.name] = target
    return names


def _apply(labeler: Labeler, node: Node, labels: dict[Node, Any]) -> tuple[Any, str]:
    """The label of a result; and, if there is no rule for the operation, why, for then what flows in stays whole."""
    target = node.target
    name = "getitem" if target is operator.getitem else str(target)
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.removeprefix("aten::")
    rule = RULES.get(name) or RULES.get(name.removesuffix("_"))  # in place: as its namesake
    value = node.meta.get("val")
    nothing = [NONE] * len(value) if isinstance(value, (tuple, list)) else NONE
    if not any(labels[argument] for argument in node.all_input_nodes) and rule is not filled:
        return nothing, ""  # nothing in it can be removed, so nothing in its results can
    try:
        return (rule(labeler, Call(name, node, labels)), "") if rule else (nothing, "it has no rule")
    except UnknownOperation as error:
        return nothing, str(error)


def _any_of(labeler: Labeler, node: Node, labels: dict[Node, Any], held: dict[str, Label]) -> bool:
    """Whether units of a weight, which could have left, flow into `node`."""
    owned = [labeler.units.find(factor).reshape(-1) for label in held.values() for factor in label]
    given = [labeler.units.find(f).reshape(-1) for each in node.all_input_nodes for f in _units(labels[each])]
    return bool(owned and given) and bool(
        (np.intersect1d(np.concatenate(given), np.concatenate(owned)) != FROZEN).any()
    )


def place_of(node: Node) -> str:
    """The module of the user's code that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {"": ("",)}).values())
    return node.meta.get("stack") or stack[-1][0] or "the network"


def _freeze(labeler: Labeler, label: Any) -> None:
    labeler.freeze(_units(label))


def _units(label: Any) -> Label:
    """The factors of a label, or of those of several results."""
    return tuple(factor for part in label for factor in part) if isinstance(label, list) else label


def _collect(labeler: Labeler, held: dict[str, Label], reasons: tuple[str, ...]) -> DependencyGraph:
    """Units by the set of places they touch."""
    taken: dict[int, dict[Place, np.ndarray]] = defaultdict(dict)
    for name, label in held.items():
        for factor in label:
            dim = int(np.argmax(factor.shape))
            roots = labeler.units.find(factor).reshape(-1)
            order = np.argsort(roots, kind="stable")
            units, starts = np.unique(roots[order], return_index=True)
            for unit, indices in zip(units.tolist(), np.split(order, starts[1:]), strict=True):
                if unit != FROZEN:
                    taken[unit][Place(name, dim)] = indices
    kinds: dict[tuple[Place, ...], list[tuple[np.ndarray, ...]]] = defaultdict(list)
    for unit in sorted(taken):
        places = tuple(sorted(taken[unit]))
        kinds[places].append(tuple(taken[unit][place] for place in places))
    order = {name: position for position, name in enumerate(held)}
    groups = [Group(places, tuple(units)) for places, units in kinds.items() if len(units) > 1]
    groups.sort(key=lambda group: min(order[place.tensor] for place in group.places))
    return DependencyGraph(tuple(groups), reasons)
