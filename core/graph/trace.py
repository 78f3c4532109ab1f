"""A torch module becomes a `Network`, by `torch.export`."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
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
from penjing.core.progress import plural

Axes = Mapping[str, Mapping[int, str]]
BATCH = "batch"


@contextmanager
def quiet() -> Iterator[None]:
    """What torch logs and prints of a network that it cannot export, on dozens of lines: its error says the same."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


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


def trace(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], dynamic: Axes | None, **config: Any
) -> Network:
    """`from_torch` with twos for the example's ones in the axes that may differ. Where the module takes no twos, those
    axes are fixed. `config`: meaning, labels and pixels.

    Raises:
        InputError: see `from_torch`; or the module has no such input or axis, or does not run on its example.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"{type(model).__name__} is no torch.nn.Module; write one whose forward calls it")
    values, spec = pytree.tree_flatten((args, named))
    if any(isinstance(value, np.ndarray) for value in values):
        raise InputError("the example holds an array of numpy's; give tensors, as torch.from_numpy(array) makes them")
    names = _input_names(model, args, named)
    _check_axes(dynamic or {}, model, names, values)
    axes = [{0: BATCH} if dynamic is None else dynamic.get(name, {}) for name in names]
    more_args, more_named = pytree.tree_unflatten(without_ones(values, axes), spec)
    training = model.training
    try:
        return from_torch(model, more_args, keyword=more_named, dynamic=dynamic, **config)
    except InputError:
        if _refusal(model.eval(), more_args, more_named) is None:
            raise
        error = _refusal(model, args, named)
    finally:
        model.train(training)
    if error is not None:
        raise InputError(
            f"{type(model).__name__} does not run on its example: {first_line(error)}; mend the network, or give "
            "another example"
        ) from error
    return from_torch(model, args, keyword=named, dynamic={} if dynamic is None else dynamic, **config)


def _doubled(
    args: tuple[Any, ...], named: dict[str, Any], dynamic: Axes | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Batches of one as batches of two, if nobody said which axes are open."""
    if dynamic is not None:
        return args, named
    values, spec = pytree.tree_flatten((args, named))
    return pytree.tree_unflatten(without_ones(values, [{0: BATCH}] * len(values)), spec)


def without_ones(values: Sequence[Any], axes: Sequence[Mapping[int, str]]) -> list[Any]:
    """Axes of `values` that are named and show a one, twice as long: torch.export takes a size of one for a constant.

    Args:
        values: tensors, and what else an example holds, which stays.
        axes: for each of them axis → name. Where another axis of the same name shows another size, a one stays.
    """
    said = [
        {axis: word for axis, word in each.items() if isinstance(value, Tensor) and 0 <= axis < value.ndim}
        for value, each in zip(values, axes, strict=True)
    ]
    shown = [(word, value.shape[axis]) for value, each in zip(values, said, strict=True) for axis, word in each.items()]
    ones = {word for word, _ in shown} - {word for word, size in shown if size != 1}
    sizes = [
        [2 if each.get(axis) in ones else 1 for axis in range(value.ndim)] if each else []
        for value, each in zip(values, said, strict=True)
    ]
    return [value.repeat(each) if 2 in each else value for value, each in zip(values, sizes, strict=True)]


def remarks(network: Network, dynamic: Axes) -> list[str]:
    """What is to be said of a network that was read: axes of `dynamic` of which it takes the size of its example alone,
    and weights that are no numbers."""
    opened = {size for one in network.config.inputs for size in one.shape}
    said = [(name, axis, word) for name, axes in dynamic.items() for axis, word in axes.items()]
    found = [
        f"--dynamic {name}:{axis}={word}: the network takes one size alone there, so it is fixed"
        for name, axis, word in said
        if word not in opened
    ]
    for name, tensor in network.module.state_dict().items():
        if tensor.is_floating_point() and (count := int(tensor.isnan().sum())):
            found.append(
                f"{name} holds NaN at {count:,} of {tensor.numel():,} places, which every answer may become; was it "
                "damaged, or did the training diverge?"
            )
    return found


def _refusal(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Exception | None:
    try:
        with torch.no_grad():
            model(*args, **named)
    except Exception as error:  # code of anybody's
        return error
    return None


def _export(
    model: nn.Module, args: tuple[Any, ...], named: dict[str, Any], dynamic: Axes | None
) -> tuple[ExportedProgram, dict[str, str]]:
    """The program, and the name of each symbol in its shapes."""
    training = model.training
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # it is one operator that nothing else computes
    try:
        with torch.no_grad(), without_stacks(), quiet(), warnings.catch_warnings():
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
            if not isinstance(size, int) and _fixed_at(size) is None:
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
                raise InputError(f"the axis {name}:{axis}={word}: {name} has {plural(value.ndim, 'axis', 'axes')}")


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
    shape = tuple(_spoken(size, symbols) if (fixed := _fixed_at(size)) is None else fixed for size in value.shape)
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def _fixed_at(size: Any) -> int | None:
    """The number that a size is; also that of an axis that was open, and of which the network takes this size alone."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else None


def _spoken(size: Any, symbols: Mapping[str, str]) -> str:
    """The name of a size, or one that is computed from others, in their names: "batch*49"."""
    if str(size) in symbols:
        return symbols[str(size)]
    found = size.node.expr
    named = {symbol: type(symbol)(symbols.get(str(symbol), str(symbol)), integer=True) for symbol in found.free_symbols}
    return str(found.xreplace(named)).replace(" ", "")  # axes of one name are one: Min(batch, batch) is batch


def _where(node: Node) -> str:
    """The module and the line of the user's code that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""
