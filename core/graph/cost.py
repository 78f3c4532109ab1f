"""Multiply-accumulates and bytes of each operator of a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node

from penjing.core.graph.network import Network, operator_name, propagate, tensor_at


@dataclass(frozen=True)
class Cost:
    """What one operator costs for the example of its network.

    Attributes:
        macs: multiply-accumulates; zero for what only moves or works on each element.
        weight_bytes: of the weights that it reads.
        result_bytes: of what it writes.
    """

    node: Node
    operator: str
    macs: int
    weight_bytes: int
    result_bytes: int


def costs(network: Network) -> list[Cost]:
    """The cost of each operator, in order.

    Raises:
        InputError: an operator does not fit its arguments.
    """
    propagate(network)
    found = []
    for node in network.module.graph.nodes:
        if name := operator_name(node):
            weights = {str(part.target) for part in node.all_input_nodes if part.op == "get_attr"}
            read = sum(tensor_at(network.module, weight).nbytes for weight in weights)
            found.append(Cost(node, name, macs_of(node), read, sum(value.nbytes for value in _tensors(node))))
    return found


def macs_of(node: Node) -> int:
    """Multiply-accumulates of an operator whose `meta["val"]` is known; see `propagate`."""
    name = operator_name(node)
    shapes = [_shape(part) for part in node.args]
    out = next((math.prod(value.shape) for value in _tensors(node)), 0)
    if name.startswith("conv_transpose"):
        return math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if name.startswith("conv"):
        turned = name == "convolution" and node.args[6] is True
        return math.prod(shapes[0] if turned else (out,)) * math.prod(shapes[1][1:])
    if name in ("linear", "matmul", "mm", "bmm", "mv", "dot"):
        return out * shapes[0][-1]
    if name in ("addmm", "baddbmm"):
        return out * shapes[1][-1]
    if name == "scaled_dot_product_attention":
        *batch, queries, width = shapes[0]
        return math.prod(batch) * queries * shapes[1][-2] * (width + shapes[2][-1])
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        weights: Any = node.args[2]
        steps = math.prod(shapes[0][:-1])
        return steps * sum(math.prod(_shape(part)) for part in weights if len(_shape(part)) == 2)
    if name == "einsum":
        operands: Any = node.args[1]
        return _einsum(str(node.args[0]), [_shape(part) for part in operands])
    return 0


def _einsum(equation: str, shapes: list[tuple[int, ...]]) -> int:
    sizes: dict[str, int] = {}
    for letters, shape in zip(equation.replace(" ", "").split("->")[0].split(","), shapes, strict=True):
        behind = letters.partition("...")[2] if "..." in letters else ""
        before = letters.partition("...")[0]
        extra = len(shape) - len(before) - len(behind)
        whole = [*before, *[f".{index}" for index in range(extra)], *behind] if "..." in letters else list(letters)
        sizes |= dict(zip(whole, shape, strict=True))
    return math.prod(sizes.values())


def _shape(part: Any) -> tuple[int, ...]:
    value = part.meta.get("val") if isinstance(part, Node) else None
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _tensors(node: Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(part, Tensor):
            yield part
