"""An ONNX model as a torch module, which any tracer takes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from keyword import iskeyword
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from penjing.core.errors import InputError, first_line
from penjing.core.onnx_reader import arithmetic, attention, layers, recurrent, resize, shapes
from penjing.core.onnx_reader.host import HOST
from penjing.core.onnx_reader.values import Call, Constant, Host, Value, Weights, to_torch

OPERATORS: dict[str, Callable[[Call], Any]] = {
    **arithmetic.OPERATORS,
    **layers.OPERATORS,
    **shapes.OPERATORS,
    **recurrent.OPERATORS,
    **resize.OPERATORS,
    **attention.OPERATORS,
}
"""Every operator of ONNX that is computed; `If` with a fixed condition besides."""
_TRAINED = ("Add", "Mul", "Gather")  # of the operators in `HOST`, those whose tensors are trained
LONGEST = 180  # characters of a name that is kept; config.json takes 200


class OnnxModule(Weights):
    """Computes the graph of `model`, node by node.

    Its first call must be on real tensors: constants become weights there, and what depends on constants alone is
    computed once. Inputs are positional and by name; outputs come by name.

    Args:
        fixed: inputs that have one value forever, such as a sampling rate.

    Raises:
        InputError: an operator or a type of numbers that penjing does not compute.
    """

    def __init__(self, model: ir.Model, path: str, fixed: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        self._model, self._path = model, path
        self._version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
        graph = model.graph
        fixed = fixed or {}
        inputs = [value for value in graph.inputs if value.name not in graph.initializers and value.name not in fixed]
        self.input_names = legal_names([str(value.name) for value in inputs])
        self._inputs = [str(value.name) for value in inputs]
        self._outputs = legal_outputs([str(value.name) for value in graph.outputs])
        self._constants = {
            str(name): Constant(str(name), to_torch(_content(value, path), f"{path}: {name}"))
            for name, value in graph.initializers.items()
        } | {name: Constant(name, value) for name, value in fixed.items()}
        unknown = sorted({node.op_type for node in graph if node.op_type not in (*OPERATORS, "If", "Constant")})
        if unknown:
            first = next(node for node in graph if node.op_type == unknown[0])
            others = f" (and {', '.join(unknown[1:])})" if len(unknown) > 1 else ""
            raise InputError(
                f"{path}: {first.op_type} {first.name or first.outputs[0].name} is an operator that penjing does not "
                f"compute{others}; export the network without it, or add it to core/onnx_reader"
            )

        def forward(*values: Tensor) -> dict[str, Tensor]:
            return self.compute(*values)[0]

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in self.input_names.values()]
        )
        self.forward = forward

    def compute(self, *inputs: Tensor) -> tuple[dict[str, Tensor], dict[str, Value]]:
        """The outputs by name, and every result by name."""
        values: dict[str, Value] = dict(zip(self._inputs, inputs, strict=True))
        self._run(self._model.graph, values)
        outputs: dict[str, Tensor] = {}
        for value, legal in zip(self._model.graph.outputs, self._outputs, strict=True):
            name = str(value.name)
            result = self._constants.get(name) or values[name]
            if isinstance(result, Constant):
                result = self.held(result, trained=False)
            elif isinstance(result, Host):
                result = result.tensor()
            assert isinstance(result, Tensor)
            outputs[legal] = result
        return outputs, values

    def _run(self, graph: ir.Graph, values: dict[str, Value]) -> None:
        for node in graph:
            names = [str(value.name) for value in node.outputs]
            if all(name in self._constants for name in names if name):
                continue
            given = [self._read(value, values) for value in node.inputs]
            while given and given[-1] is None:
                given.pop()
            folding = all(isinstance(value, Constant) or value is None for value in given)
            call = Call(node, given, self._version, self, folding)
            for name, result in zip(names, self._results(call, values), strict=False):
                if not name:
                    continue
                if folding and node.op_type != "If":
                    tensor = result.tensor() if isinstance(result, Host) else result
                    assert isinstance(tensor, Tensor)
                    self._constants[name] = Constant(name, tensor)
                else:
                    values[name] = result

    def _read(self, value: ir.Value | None, values: dict[str, Value]) -> Value:
        if value is None or not value.name:
            return None
        return self._constants[value.name] if value.name in self._constants else values[value.name]

    def _results(self, call: Call, values: dict[str, Value]) -> tuple[Value, ...]:
        kind = call.node.op_type
        try:
            if kind == "If":
                return self._branch(call, values)
            if kind in HOST and call.values and not call._folding:
                held = [call.host(index) for index in range(len(call.values)) if call.has(index)]
                if any(isinstance(value, Host) for value in call.values) and all(held):
                    for index, value in enumerate(call.values):
                        if isinstance(value, Constant):  # sizes that are open may make it a tensor when it is traced
                            self.held(value, trained=kind in _TRAINED and call.is_weight(index))
                    done = HOST[kind](call, held)  # type: ignore[arg-type]
                    if done is not None:
                        return (done,)
            result = OPERATORS[kind](call)
            return result if isinstance(result, tuple) else (result,)
        except InputError as error:
            raise InputError(f"{self._path}: {error}") from None
        except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, ArithmeticError) as error:
            if torch.compiler.is_compiling() or torch.compiler.is_exporting():
                raise  # the tracer reads some of these itself
            shapes_of = ", ".join(_shown(value) for value in call.values)
            raise InputError(f"{self._path}: {call} does not run on {shapes_of}: {first_line(error)}") from error

    def _branch(self, call: Call, values: dict[str, Value]) -> tuple[Value, ...]:
        condition = call.host(0)
        if condition is None:
            raise call.refused("chooses by values that the network computes; export the network without branches")
        graph: ir.Graph = call.node.attributes["then_branch" if bool(condition.array.item()) else "else_branch"].value
        for name, value in graph.initializers.items():
            if str(name) not in self._constants:
                self._constants[str(name)] = Constant(str(name), to_torch(_content(value, self._path), str(name)))
        self._run(graph, values)
        return tuple(self._read(value, values) for value in graph.outputs)


def _content(value: ir.Value, path: str) -> ir.TensorProtocol:
    if value.const_value is None:
        raise InputError(f"{path}: {value.name} has no content; get the file again")
    return value.const_value


def _shown(value: Value) -> str:
    if isinstance(value, Constant):
        return f"{value.name}{list(value.tensor.shape)}"
    if isinstance(value, Host):
        return str(np.array(value.array).tolist())
    return str(list(value.shape)) if isinstance(value, Tensor) else "nothing"


def legal_names(names: list[str]) -> dict[str, str]:
    """Each name → the identifier that a graph's input has instead ("input.1" → "input_1")."""
    found: dict[str, str] = {}
    for name in names:
        legal = re.sub(r"[^A-Za-z0-9_]", "_", name[:LONGEST])
        legal = legal if legal.isidentifier() and not iskeyword(legal) and legal != "self" else f"input_{legal}"
        while legal in found.values():
            legal += "_"
        found[name] = legal
    return found


def legal_outputs(names: list[str]) -> list[str]:
    """The names of outputs as config.json takes them, each another one."""
    found: list[str] = []
    for name in names:
        legal = re.sub(r"[^A-Za-z0-9_.:/-]", "_", name[:LONGEST])
        legal = legal if legal[:1].isalpha() or legal[:1] == "_" else f"output_{legal}"
        while legal in found:
            legal += "_"
        found.append(legal)
    return found
