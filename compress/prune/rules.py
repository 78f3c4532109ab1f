"""What each ATen operation does to labels. An operation that is not listed is refused by name, never guessed.

A rule takes the labeler and the call and returns the label of the result, or a list of labels for several results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from penjing.compress.prune.labels import NONE, Label, Labeler


class UnknownOperation(Exception):  # noqa: N818  (becomes an InputError that names the operation's place)
    """No rule says what an operation, or this use of it, does to labels."""


@dataclass(frozen=True)
class Call:
    """One node with the labels of the tensors that it takes."""

    name: str  # "conv2d" for aten.conv2d.default
    node: Node
    labels: dict[Node, Any]

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """The argument as the graph has it."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    def label(self, argument: Any) -> Label:
        """The label of an argument; numbers and None have none."""
        return self.labels[argument] if isinstance(argument, Node) else NONE

    def shape(self, argument: Any = None) -> tuple[int, ...]:
        """The shape of an argument, or of the result."""
        return tuple(value_of(self.node if argument is None else argument).shape)


Rule = Callable[[Labeler, Call], Any]
RULES: dict[Any, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for `aten` operations, all overloads."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def value_of(argument: Any) -> Any:
    """The fake tensor of a node; a plain number is itself."""
    return argument.meta["val"] if isinstance(argument, Node) else argument


def tensors_of(arguments: Sequence[Any]) -> list[Node]:
    """The nodes among `arguments` that are tensors."""
    return [a for a in arguments if isinstance(a, Node) and isinstance(value_of(a), torch.Tensor)]


@rule(
    *("add", "sub", "mul", "div", "rsub", "pow", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square"),
    *("relu", "relu6", "silu", "gelu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu"),
    *("mish", "softplus", "erf", "sin", "cos", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where"),
    *("dropout", "feature_dropout", "clone", "contiguous", "detach", "alias", "to", "_to_copy", "type_as", "prelu"),
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_not"),
    *("masked_fill", "lift_fresh_copy", "isfinite", "__and__", "__or__"),
)
def elementwise(labeler: Labeler, call: Call) -> Label:
    nodes = tensors_of([*call.node.args, *call.node.kwargs.values()])
    return labeler.broadcast([call.label(node) for node in nodes], [call.shape(node) for node in nodes])


@rule(
    *("arange", "zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like", "rand_like"),
    *("new_zeros", "new_ones", "new_full", "randn", "rand", "linspace", "empty_like", "_assert_tensor_metadata"),
)
def constant(labeler: Labeler, call: Call) -> Label:
    return NONE


@rule("softmax", "_softmax", "log_softmax", "cumsum", "normalize", "sort", "topk")
def mixing(labeler: Labeler, call: Call) -> Label:
    """Each result along a dimension depends on all its elements: none can go alone."""
    x = call.arg(0)
    return labeler.pinned(call.label(x), [call.arg(1) % len(call.shape(x))])


@rule(
    *("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool1d", "avg_pool1d"),
    *(
        "adaptive_avg_pool1d",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "constant_pad_nd",
        "pad",
    ),
    "max_pool2d_with_indices",
)
def spatial(labeler: Labeler, call: Call) -> Any:
    """Channels stay apart; places mix."""
    x = call.arg(0)
    num_dims = len(call.shape(x))
    if call.name in ("pad", "constant_pad_nd") and len(call.arg(1)) > 2 * (num_dims - 2):
        raise UnknownOperation("padding of channels")
    label = labeler.pinned(call.label(x), range(2, num_dims))
    return [label, label] if isinstance(value_of(call.node), (tuple, list)) else label


@rule("mean", "sum", "amax", "amin", "var", "std", "argmax", "argmin", "any", "all", "max", "min")
def reduction(labeler: Labeler, call: Call) -> Label:
    x = call.arg(0)
    num_dims = len(call.shape(x))
    dims = call.arg(1, "dim", None)
    dims = list(range(num_dims)) if dims is None or dims == [] else [dims] if isinstance(dims, int) else list(dims)
    dims = sorted(dim % num_dims for dim in dims)
    label = labeler.reduce(call.label(x), dims)
    if len(call.shape()) == num_dims:
        return label
    return tuple(factor.squeeze(tuple(dims)) for factor in label)
