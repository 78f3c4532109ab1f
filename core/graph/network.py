"""`Network`: an `fx` graph of ATen operators, its weights by name, and what its inputs and outputs are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Node

from penjing.core.errors import InputError, first_line
from penjing.core.graph.config import GraphConfig
from penjing.core.graph.operators import described

_MODES = {"batch_norm": 5, "dropout": 2, "feature_dropout": 2, "alpha_dropout": 2}
"""Operators that differ between training and evaluation, and which of their arguments says so."""


class GraphModule(fx.GraphModule):
    """An `fx.GraphModule` whose batch norms and dropouts follow `train()` and `eval()`, in any training loop."""

    def train(self, mode: bool = True) -> GraphModule:
        """Put batch norms and dropouts into training (or evaluation) mode; norms without statistics have one alone."""
        super().train(mode)
        changed = False
        for node in self.graph.nodes:
            position = _MODES.get(operator_name(node))
            if position is not None and node.args[position] is not mode and not _always_measures(node):
                node.update_arg(position, mode)
                changed = True
        if changed:
            self.recompile()
        return self


def _always_measures(node: Node) -> bool:
    """Whether it is a batch norm that keeps no statistics, such as one over a weight."""
    return operator_name(node) == "batch_norm" and node.args[3] is None


@dataclass(frozen=True)
class Network:
    """A network in static single assignment.

    Attributes:
        module: the graph. Its nodes are placeholders (the inputs of `config`, in order), `get_attr` (weights and
            constants, by name), `call_function` (ATen operators, `operator.getitem`, arithmetic of sizes) and one
            output: a tuple of tensors, in the order of `config.outputs`. No operator writes into its arguments.
        config: names, types and shapes of inputs and outputs, and what they mean.
        example: inputs by name that show it; dynamic axes have a size of two or more.
        tokenizer: the content of a tokenizer.json by which texts become its inputs; None: it has none.
    """

    module: fx.GraphModule
    config: GraphConfig
    example: dict[str, Tensor]
    tokenizer: str | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of `config.outputs`."""
        return self.module(*inputs)

    def inputs(self) -> tuple[Tensor, ...]:
        """The example, in the order of `config.inputs`."""
        return tuple(self.example[spec.name] for spec in self.config.inputs)

    def copy(self) -> Network:
        """The same network with weights and a graph of its own."""
        return replace(self, module=copy.deepcopy(self.module))

    def with_module(self, module: fx.GraphModule) -> Network:
        """The same inputs and outputs, computed by `module`."""
        return replace(self, module=module)

    def text(self) -> str:
        """One line an operator: result, its type and shape, operator and arguments."""
        propagate(self)
        lines = [f"{spec} -> input" for spec in self.config.inputs]
        for node in self.module.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                said = node.target if node.op == "get_attr" else f"{described(node.target)}({_said(node)})"
                lines.append(f"{node.name}: {_kind(node.meta.get('val'))} = {said}")
        output = next(node for node in self.module.graph.nodes if node.op == "output")
        lines += [f"{spec} <- {node}" for spec, node in zip(self.config.outputs, output.args[0], strict=True)]
        return "\n".join(lines)


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; tied ones under each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def tensor_at(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer `name`."""
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Put `value` (a parameter, or else a buffer) at `name`; modules on the way are made."""
    path, _, leaf = name.rpartition(".")
    owner: nn.Module = module
    for part in filter(None, path.split(".")):
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    owner._parameters.pop(leaf, None)
    owner._buffers.pop(leaf, None)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(leaf, value)
    else:
        owner.register_buffer(leaf, value)


def operator_name(node: Node) -> str:
    """The ATen operator of a node without its overload ("conv2d"); "" for anything else."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return target._schema.name.removeprefix("aten::")


def propagate(network: Network, inputs: Sequence[Tensor] | None = None) -> None:
    """Put type and shape of every result into `node.meta["val"]` (a fake tensor, a number, or a list of them).

    Args:
        inputs: in the order of `config.inputs`; the example, if left out.

    Raises:
        InputError: an operator does not fit its arguments; the node is named.
    """
    propagate_module(network.module, inputs or network.inputs())


def propagate_module(module: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """As `propagate`; weights and inputs may be fake or without storage.

    Raises:
        InputError: an operator does not fit its arguments; the node is named.
    """
    known = [value.fake_mode for value in inputs if isinstance(value, FakeTensor)]
    mode = known[0] if known else FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        fakes = [value if isinstance(value, FakeTensor) else mode.from_tensor(value) for value in inputs]
        _Shapes(module).run(*fakes)


class _Shapes(fx.Interpreter):
    """Runs a graph on fake tensors and keeps each result beside its node."""

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
            where = described(n.target) if n.op == "call_function" else n.op
            raise InputError(f"the graph does not run: {n.name} = {where}({_said(n)}): {first_line(error)}") from None
        n.meta["val"] = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.aten.batch_norm.default and _fits(args):
            return torch.empty_like(args[0])  # torch asks a decomposition of 100 calls for that
        return super().call_function(target, args, kwargs)


def _fits(args: tuple[Any, ...]) -> bool:
    """Whether the weights of a batch norm, as far as there are any, have the channels of its input."""
    x, *weights = args[:5]
    return x.dim() >= 2 and all(weight is None or weight.shape == x.shape[1:2] for weight in weights)


def _said(node: Node) -> str:
    named = [f"{key}={value}" for key, value in node.kwargs.items()]
    return ", ".join([*map(str, node.args), *named])


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__
