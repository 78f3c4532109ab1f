"""A torch module becomes a `Network`, by `torch.export`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.fx import config as tracing
from torch.utils import _pytree as pytree

from penjing.core.errors import InputError, first_line
from penjing.core.graph.config import DTYPE_NAMES, GraphConfig, Meaning, Pixels, TensorSpec
from penjing.core.graph.functional import SeenElsewhereError, make_functional, tidy, writes
from penjing.core.graph.network import GraphModule, Network, set_tensor
from penjing.core.graph.operators import described, name_of_target

Axes = Mapping[str, Mapping[int, str]]
BATCH = "batch"


@contextmanager
def without_stacks() -> Iterator[None]:
    """What torch traces inside notes no lines of Python, which nothing here reads: they take a tenth of an export."""
    before = tracing.do_not_emit_stack_traces
    tracing.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        tracing.do_not_emit_stack_traces = before


def from_torch(
    model: nn.Module,
    example: Sequence[Any] = (),
    *,
    keyword: Mapping[str, Any] | None = None,
    dynamic: Axes | None = None,
    meaning: Meaning = "tensors",
    labels: Sequence[str] = (),
    pixels: Pixels | None = None,
) -> Network:
    """The network that `model` computes in evaluation mode; weights are shared with it, not copied.

    Args:
        model: what `torch.export` takes: no control flow that depends on values.
        example: inputs that show it, positional; `keyword`: by name.
        dynamic: input → axis → name of what may differ from call to call; {"x": {0: "batch"}} if left out, for every
            input. Axes of one name are equal. An axis that the network turns out to fix is fixed.
        meaning, labels, pixels: see `GraphConfig`.

    Raises:
        InputError: it cannot be exported, uses an operator that penjing does not know, or gives no tensors; says which.
    """
    args, named = _doubled(tuple(example), dict(keyword or {}), dynamic)
    program, axis_names = _export(model, args, named, dynamic)
    graph_module, inputs, outputs = _unlifted(program)
    specs = [_spec(name, node.meta["val"], axis_names) for name, node in inputs]
    if not specs or not outputs:
        raise InputError(f"{type(model).__name__} takes or gives no tensors; penjing needs at least one of each")
    given = dict(_flat(program, args, named))
    config = GraphConfig(
        inputs=tuple(specs),
        outputs=tuple(_spec(name, node.meta["val"], axis_names) for name, node in outputs),
        meaning=meaning,
        labels=tuple(labels),
        pixels=pixels,
    )
    return Network(graph_module, config, {name: given[name] for name, _ in inputs})


def _doubled(
    args: tuple[Any, ...], named: dict[str, Any], dynamic: Axes | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Batches of one as batches of two: a size of one is taken for a constant by torch.export."""
    if dynamic is not None:
        return args, named

    def twice(value: Any) -> Any:
        return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim else value

    tensors = [value for value in pytree.tree_leaves((args, named)) if isinstance(value, Tensor) and value.ndim]
    if any(len(value) != 1 for value in tensors):
        return args, named
    return pytree.tree_map(twice, (args, named))


def _export(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], dynamic: Axes | None
) -> tuple[ExportedProgram, dict[str, str]]:
    """The program, and the name of each symbol in its shapes."""
    training = model.training
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator that nothing else computes
    try:
        with torch.no_grad(), without_stacks(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The tensor attribute", UserWarning)  # recurrent layers flatten weights
            program = _exported(model, args, named, dynamic)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be exported: {first_line(error)}; penjing takes networks whose control "
            "flow does not depend on values"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        model.train(training)
    symbols: dict[str, str] = {}
    shown: dict[str, int] = {}  # name → its size in the example: what was given another size there is no such axis
    axes = None if dynamic is None else {name.lower(): each for name, each in dynamic.items()}  # as torch.export does
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    for name in program.graph_signature.user_inputs:
        value = values.get(str(name))
        for axis, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if not isinstance(size, int):
                wanted = BATCH if axes is None else (axes.get(str(name).lower()) or {}).get(axis, f"{name}_{axis}")
                equal = shown.setdefault(wanted, size.node.hint) == size.node.hint
                symbols.setdefault(str(size), wanted if equal else f"{name}_{axis}")
    return program, symbols


def _exported(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], dynamic: Axes | None) -> ExportedProgram:
    shapes = ShapesCollection()
    names = _input_names(model, args, named)
    _check_axes(dynamic or {}, model, names, pytree.tree_leaves((args, named)))
    for name, value in zip(names, pytree.tree_leaves((args, named)), strict=True):
        if isinstance(value, Tensor) and value.ndim:
            axes = {0: BATCH} if dynamic is None else dynamic.get(name, {})
            shapes[value] = {axis: Dim.AUTO for axis in axes if value.shape[axis] > 1}
    program = torch.export.export(
        model, args, named, dynamic_shapes=shapes.dynamic_shapes(model, args, named), strict=False
    )
    try:
        make_functional(program.graph)
    except SeenElsewhereError:
        program = torch.export.export(
            model, args, named, dynamic_shapes=shapes.dynamic_shapes(model, args, named), strict=False
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`isinstance", FutureWarning)  # torch 2.13 warns of its own code
            program = program.run_decompositions({})
    return program


def _check_axes(dynamic: Axes, model: nn.Module, names: Sequence[str], values: Sequence[Any]) -> None:
    """Refuse axes that no input has: one that is not found would be fixed without a word."""
    known = {*names, *inspect.signature(model.forward).parameters}
    if odd := sorted(set(dynamic) - known):
        raise InputError(f"{type(model).__name__} has no input {odd[0]!r}; its inputs are {', '.join(names)}")
    for name, value in zip(names, values, strict=True):
        for axis, word in dynamic.get(name, {}).items():
            if isinstance(value, Tensor) and not 0 <= axis < value.ndim:
                raise InputError(f"the axis {name}:{axis}={word} is none of the {value.ndim} axes of {name}")


def _input_names(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> list[str]:
    """The name of each leaf of the inputs: that of the parameter of `forward`, with its place where it is a list."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **named)
    except TypeError as error:
        raise InputError(f"{type(model).__name__} does not take these inputs: {error}") from None
    found: dict[int, str] = {}
    for name, value in bound.arguments.items():
        for leaf in pytree.tree_leaves(value):
            found.setdefault(id(leaf), name)
    return [found.get(id(leaf), "input") for leaf in pytree.tree_leaves((args, named))]


def _flat(program: ExportedProgram, args: tuple[Any, ...], named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    leaves = pytree.tree_leaves((args, named))
    users = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    yield from zip(users, leaves, strict=True)


def _unlifted(program: ExportedProgram) -> tuple[fx.GraphModule, list[tuple[str, Node]], list[tuple[str, Node]]]:
    """The graph with its weights as attributes; its inputs and its outputs by name."""
    root = nn.Module()
    new = fx.Graph()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    held: dict[int, str] = {}
    values: dict[Node, Any] = {}
    inputs: list[tuple[str, Node]] = []
    parameters = program.state_dict
    results: tuple[Any, ...] = ()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = specs[node.name]
            if spec.kind is not InputKind.USER_INPUT:
                if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
                    raise InputError(
                        f"the network takes {spec.kind.name.lower()} {node.name}, which penjing cannot keep"
                    )
                target = str(spec.target)
                tensor: Any = parameters[target] if target in parameters else program.constants[target]
                name = held.setdefault(id(tensor), target)
                if name == target:
                    set_tensor(root, name, tensor)
                values[node] = new.get_attr(name)
            elif isinstance(node.meta.get("val"), Tensor):
                values[node] = new.placeholder(node.name)
                inputs.append((node.name, values[node]))
            else:
                continue  # a number or None, which the exported graph holds as a constant
        elif node.op == "call_function":
            values[node] = new.node_copy(node, values.__getitem__)
        elif node.op == "output":
            results = node.args[0]  # type: ignore[assignment]
        elif node.op == "get_attr":
            raise InputError(f"the network has a branch or a loop ({node.target}), which penjing does not take")
        if node in values:
            values[node].meta = {"val": node.meta.get("val"), "stack": _where(node)}
    users = [spec.arg for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    last = results[len(results) - len(users) :]
    outputs = [
        (name, values[node])
        for name, node in zip(_output_names(program, len(last)), last, strict=True)
        if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)
    ]
    new.output(tuple(node for _, node in outputs))
    tidy(new)
    for node in new.nodes:
        if node.op == "call_function":
            name_of_target(node.target)
            if writes(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
                raise InputError(f"the network uses {described(node.target)}, which writes into its argument")
    for name in [name for name, _ in [*root.named_parameters(), *root.named_buffers()]]:
        if not any(node.op == "get_attr" and node.target == name for node in new.nodes):
            _drop(root, name)
    module = GraphModule(root, new)
    module.eval()
    return module, inputs, outputs


def _drop(root: nn.Module, name: str) -> None:
    """Take a weight that no operator reads out of `root`."""
    path, _, leaf = name.rpartition(".")
    delattr(root.get_submodule(path), leaf)


def _output_names(program: ExportedProgram, count: int) -> list[str]:
    spec = program.call_spec.out_spec
    assert spec is not None
    tree = pytree.tree_unflatten(list(range(count)), spec)
    names = [""] * count

    def walk(value: Any, path: tuple[str, ...]) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                walk(part, (*path, str(key)))
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                walk(part, (*path, str(index)) if len(value) > 1 or path else path)
        elif isinstance(value, int):
            names[value] = "_".join(path) if path and not path[0].isdigit() else "_".join(("output", *path))

    walk(tree, ())
    return [name or f"output_{index}" for index, name in enumerate(names)]


def _spec(name: str, value: Tensor, symbols: Mapping[str, str]) -> TensorSpec:
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPE_NAMES:
        raise InputError(f"{name} is {dtype}; inputs and outputs are {', '.join(DTYPE_NAMES)}")
    shape = tuple(
        size if isinstance(size, int) else symbols.get(str(size), _spoken(size, symbols)) for size in value.shape
    )
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def _spoken(size: Any, symbols: Mapping[str, str]) -> str:
    """A size that is computed from others, in their names: "batch*49"."""
    found = size.node.expr
    named = {symbol: type(symbol)(symbols.get(str(symbol), str(symbol)), integer=True) for symbol in found.free_symbols}
    return str(found.xreplace(named)).replace(" ", "")  # axes of one name are one: Min(batch, batch) is batch


def _where(node: Node) -> str:
    """The module and the line of the user's code that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""
