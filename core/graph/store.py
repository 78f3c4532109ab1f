"""A graph as JSON: one entry an operator, with the names of what it reads. No code, no pickle."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from penjing.core.errors import InputError, first_line
from penjing.core.graph.network import GraphModule, set_tensor
from penjing.core.graph.operators import name_of_target, target_of_name

SCHEMA_VERSION = 1
MAX_NODES = 1_000_000
_KINDS: dict[str, type] = {
    "dtype": torch.dtype,
    "memory_format": torch.memory_format,
    "layout": torch.layout,
}


def dump_graph(graph: fx.Graph) -> str:
    """The graph as JSON text; devices are left out, because a graph runs where its weights are.

    Raises:
        InputError: an operator or an argument that cannot be stored.
    """
    nodes = []
    for node in graph.nodes:
        entry: dict[str, Any] = {"name": node.name, "op": node.op}
        if node.op == "call_function":
            entry["target"] = name_of_target(node.target)
        elif node.op in ("get_attr", "placeholder"):
            entry["target"] = str(node.target)
        elif node.op != "output":
            raise InputError(f"the graph holds {node.op} {node.target}, which cannot be stored")
        if node.args:
            entry["args"] = [_dumped(value) for value in node.args]
        if node.kwargs:
            entry["kwargs"] = {key: _dumped(value) for key, value in node.kwargs.items()}
        if where := node.meta.get("stack"):
            entry["from"] = where
        nodes.append(entry)
    lines = ",\n".join(json.dumps(entry, allow_nan=False) for entry in nodes)
    return f'{{"schema_version": {SCHEMA_VERSION}, "nodes": [\n{lines}\n]}}\n'


def load_graph(text: str, tensors: Mapping[str, Tensor], where: str, trained: frozenset[str]) -> GraphModule:
    """The graph that `dump_graph` wrote.

    Args:
        tensors: weights and constants by name.
        where: the file, for messages.
        trained: which of them are parameters.

    Raises:
        InputError: not such a text, an operator that penjing does not know, a missing weight.
    """
    try:
        values = json.loads(text)
        if values["schema_version"] != SCHEMA_VERSION:
            raise InputError(f"schema_version is {values['schema_version']!r}, this penjing reads 1; upgrade it")
        entries = values["nodes"]
        if not isinstance(entries, list) or len(entries) > MAX_NODES:
            raise ValueError("nodes is no list, or too long")
        return _built(entries, tensors, trained)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, RecursionError) as error:
        raise InputError(
            f"{where} is damaged ({type(error).__name__}: {first_line(error)}); import the network again"
        ) from None


def _built(entries: list[Any], tensors: Mapping[str, Tensor], trained: frozenset[str]) -> GraphModule:
    root, graph = nn.Module(), fx.Graph()
    known: dict[str, Node] = {}
    for entry in entries:
        name, op = entry["name"], entry["op"]
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name) or name in known:
            raise ValueError(f"the name {name!r}")
        args = tuple(_loaded(value, known) for value in entry.get("args", []))
        kwargs = {key: _loaded(value, known) for key, value in entry.get("kwargs", {}).items()}
        if op == "placeholder":
            target = entry.get("target", name)  # "input" of a node that is called input_1
            if not isinstance(target, str) or not target.isidentifier() or iskeyword(target):
                raise ValueError(f"the name {target!r}")
            node = graph.create_node("placeholder", target, name=name)
        elif op == "get_attr":
            target = entry["target"]
            if target not in tensors:
                raise InputError(f"the weight {target!r} is missing; import the network again")
            if not all(re.fullmatch(r"[\w-]+", part, re.ASCII) and not iskeyword(part) for part in target.split(".")):
                raise ValueError(f"the name {target!r}")
            value = tensors[target]
            wanted = nn.Parameter(value, value.is_floating_point()) if target in trained else value
            if not _held(root, target):
                set_tensor(root, target, wanted)
            node = graph.create_node("get_attr", target, name=name)
        elif op == "call_function":
            target = target_of_name(entry["target"])
            _check_names(target, kwargs)  # they become code in the module's `forward`
            node = graph.create_node("call_function", target, args, kwargs, name=name)
        elif op == "output":
            node = graph.output(args[0])
        else:
            raise ValueError(f"op {op!r}")
        node.meta["stack"] = str(entry.get("from", ""))
        known[name] = node
    if not any(node.op == "output" for node in graph.nodes):
        raise ValueError("no output")
    graph.lint()
    module = GraphModule(root, graph)
    module.eval()
    return module


def _check_names(target: Any, kwargs: dict[str, Any]) -> None:
    schema = getattr(target, "_schema", None)
    known = {argument.name for argument in schema.arguments} if schema is not None else set()
    if odd := kwargs.keys() - known:
        raise ValueError(f"{target} has no argument {sorted(odd)[0]!r}")


def _held(root: nn.Module, name: str) -> bool:
    try:
        path, _, leaf = name.rpartition(".")
        return hasattr(root.get_submodule(path), leaf)
    except AttributeError:
        return False


def _dumped(value: Any) -> Any:
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return [_dumped(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.device):
        return {"device": ""}
    if isinstance(value, complex):
        raise InputError("the graph holds a complex number, which cannot be stored")
    if isinstance(value, slice):
        return {"slice": [_dumped(part) for part in (value.start, value.stop, value.step)]}
    for kind, of in _KINDS.items():
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    raise InputError(f"the graph holds a {type(value).__name__}, which cannot be stored")


def _loaded(value: Any, known: Mapping[str, Node]) -> Any:
    if isinstance(value, list):
        return [_loaded(part, known) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, said),) = value.items()
    if kind == "node":
        return known[said]
    if kind == "float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[said]
    if kind == "device":
        return torch.device("cpu")
    if kind == "slice":
        return slice(*(_loaded(part, known) for part in said))
    found = getattr(torch, said) if isinstance(said, str) and said.isidentifier() else None
    if not isinstance(found, _KINDS[kind]):
        raise ValueError(f"{kind} {said!r}")
    return found
