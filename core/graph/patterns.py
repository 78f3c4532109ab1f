"""Layers that a file wrote out in small operators, found and made whole again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from penjing.core.graph.network import Network, operator_name, tensor_at

_aten = torch.ops.aten


def is_call(value: Any, *names: str) -> bool:
    """Whether `value` is the result of one of these operators."""
    return isinstance(value, Node) and operator_name(value) in names


def sides(node: Node) -> Iterator[tuple[Any, Any]]:
    """The two operands of a sum or a product, in both orders; none where one is scaled (`alpha`)."""
    if len(node.args) >= 2 and not node.kwargs:
        yield node.args[0], node.args[1]
        yield node.args[1], node.args[0]


def _near(value: Any, wanted: float) -> bool:
    return isinstance(value, (int, float)) and math.isclose(value, wanted, rel_tol=1e-4)


def _factor(node: Any) -> tuple[Any, float]:
    """What a product or quotient with a number is of, and the factor."""
    if is_call(node, "mul") and not node.kwargs:
        for number, other in sides(node):
            if isinstance(number, (int, float)):
                return other, float(number)
    if is_call(node, "div", "true_divide") and len(node.args) == 2 and isinstance(node.args[1], (int, float)):
        return node.args[0], 1 / float(node.args[1]) if node.args[1] else 1.0
    return node, 1.0


def replace(node: Node, target: Any, args: tuple[Any, ...], **named: Any) -> Node:
    """Put another operator in the place of `node`; its type and shape stay."""
    graph: fx.Graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, args, named)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def whole_gelu(network: Network) -> int:
    """`x / 2 * (1 + erf(x / √2))`, and its approximation by tanh, in any order."""
    count = 0
    for node in list(network.module.graph.nodes):
        found = _gelu(node) if is_call(node, "mul") else None
        if found is not None:
            x, kind = found
            replace(node, _aten.gelu.default, (x,), approximate=kind)
            count += 1
    return count


def _gelu(node: Any) -> tuple[Node, str] | None:
    factors, number = _product(node)
    if len(factors) != 2 or not _near(number, 0.5):
        return None
    for gate, x in (factors, factors[::-1]):
        if not is_call(gate, "add"):
            continue
        for one, inner in sides(gate):
            if not _near(one, 1.0):
                continue
            if is_call(inner, "erf"):
                of, factor = _factor(inner.args[0])
                if of is x and _near(factor, math.sqrt(0.5)):
                    return x, "none"
            if is_call(inner, "tanh") and _is_cubic(inner.args[0], x):
                return x, "tanh"
    return None


def _product(node: Any, depth: int = 3) -> tuple[list[Any], float]:
    """The factors of nested products, numbers multiplied out."""
    of, number = _factor(node)
    if of is not node:
        factors, more = _product(of, depth - 1) if depth and len(of.users) == 1 else ([of], 1.0)
        return factors, number * more
    if depth and is_call(node, "mul") and not node.kwargs:
        factors, number = [], 1.0
        for part in node.args:
            inner = [part], 1.0
            if isinstance(part, Node) and _factor(part)[0] is not part and len(part.users) == 1:
                inner = _product(part, 0)
            factors, number = factors + inner[0], number * inner[1]
        return factors, number
    return [node], 1.0


def _is_cubic(node: Any, x: Node) -> bool:
    of, factor = _factor(node)
    if not is_call(of, "add") or not _near(factor, math.sqrt(2 / math.pi)):
        return False
    for same, cubic in sides(of):
        inner, share = _factor(cubic)
        if same is x and _near(share, 0.044715) and is_call(inner, "pow") and inner.args == (x, 3):
            return True
    return False


def whole_gates(network: Network) -> int:
    """`x · sigmoid(x)` (SiLU), `x · hardsigmoid(x)`, `x · clip(x + 3, 0, 6) / 6` and `x · tanh(softplus(x))`."""
    count = 0
    for node in list(network.module.graph.nodes):
        target = _gate(node)
        if target is not None:
            replace(node, target[0], (target[1],))
            count += 1
    return count


def _gate(node: Any) -> tuple[Any, Node] | None:
    if not is_call(node, "mul", "div"):
        return None
    factors, number = _product(node)
    if len(factors) != 2:
        return None
    for gate, x in (factors, factors[::-1]):
        if not isinstance(gate, Node) or not gate.args or not isinstance(x, Node):
            continue
        inner = gate.args[0]
        if number == 1 and is_call(gate, "sigmoid") and inner is x:
            return _aten.silu.default, x
        if number == 1 and is_call(gate, "hardsigmoid") and inner is x:
            return _aten.hardswish.default, x
        if number == 1 and is_call(gate, "tanh") and is_call(inner, "softplus") and inner.args == (x,):  # type: ignore[union-attr]
            return _aten.mish.default, x
        clipped = is_call(gate, "relu6") or (is_call(gate, "hardtanh", "clamp") and tuple(gate.args[1:]) == (0, 6))
        if clipped and _near(number, 1 / 6) and is_call(inner, "add") and (x, 3) in sides(inner):  # type: ignore[arg-type]
            return _aten.hardswish.default, x
    return None


def whole_layer_norm(network: Network) -> int:
    """`(x - mean) / √(variance + ε) · weight + bias` over the last axis."""
    count = 0
    for node in list(network.module.graph.nodes):
        found = _normalized(node)
        if found is None:
            continue
        x, eps = found
        width = x.meta["val"].shape[-1]
        weight, scaled = _affine(network, node, "mul", width)
        bias, last = _affine(network, scaled, "add", width) if weight is not None else (None, scaled)
        if isinstance(width, int):
            replace(last, _aten.layer_norm.default, (x, [width], weight, bias, eps))
            count += 1
    return count


def _normalized(node: Any) -> tuple[Node, float] | None:
    """x and ε of (x - mean) divided by its deviation."""
    if is_call(node, "div") and len(node.args) == 2 and is_call(node.args[1], "sqrt"):
        centred, spread = node.args[0], node.args[1].args[0]  # type: ignore[union-attr]
    elif is_call(node, "mul"):
        pair = next(((a, b) for a, b in sides(node) if is_call(b, "rsqrt", "reciprocal")), None)
        if pair is None:
            return None
        centred, spread = pair[0], pair[1].args[0]
        if is_call(pair[1], "reciprocal"):
            if not is_call(spread, "sqrt"):
                return None
            spread = spread.args[0]
    else:
        return None
    if not is_call(centred, "sub") or not is_call(spread, "add") or len(centred.args) != 2:
        return None
    x, mean = centred.args
    variance, eps = spread.args[0], spread.args[1]
    if not _last_mean(mean, x) or not isinstance(eps, float) or not _last_mean(variance, None):
        return None
    squares = variance.args[0]
    again = is_call(squares, "pow") and squares.args[1] == 2
    if not (again or (is_call(squares, "mul") and squares.args[0] is squares.args[1])):
        return None
    base = squares.args[0]
    same = base is centred or (is_call(base, "sub") and base.args[0] is x and _last_mean(base.args[1], x))
    return (x, eps) if same else None


def _last_mean(node: Any, of: Any) -> bool:
    if not is_call(node, "mean") or len(node.args) < 3 or node.args[2] is not True:
        return False
    rank = node.args[0].meta["val"].dim()
    return (of is None or node.args[0] is of) and list(node.args[1]) in ([-1], [rank - 1])


def _affine(network: Network, node: Node, name: str, width: Any) -> tuple[Node | None, Node]:
    """The weight of `width` numbers that `node` alone is multiplied by (or added to), and the result."""
    users = list(node.users)
    if len(users) == 1 and is_call(users[0], name):
        for other, weight in sides(users[0]):
            held = isinstance(weight, Node) and weight.op == "get_attr"
            if held and other is node and tuple(tensor_at(network.module, str(weight.target)).shape) == (width,):
                return weight, users[0]
    return None, node


def whole_attention(network: Network) -> int:
    """`softmax(q · kᵀ · scale + mask) · v`."""
    count = 0
    for node in list(network.module.graph.nodes):
        if not is_call(node, "matmul") or not is_call(node.args[0], "softmax") or len(node.args[0].users) != 1:
            continue
        weights, value = node.args
        scores, mask = weights.args[0], None
        if weights.args[1] not in (-1, scores.meta["val"].dim() - 1):
            continue
        if is_call(scores, "add") and not scores.kwargs and len(scores.users) == 1:
            pair = next(((a, b) for a, b in sides(scores) if _is_scores(a) and isinstance(b, Node)), None)
            if pair is None:
                continue
            scores, mask = pair
        product, scale = _factor(scores)
        if not is_call(product, "matmul") or len(product.users) != 1 or len(scores.users) != 1:
            continue
        query, turned = product.args
        (query, one), (turned, other) = _factor(query), _factor(turned)
        ranks = {part.meta["val"].dim() for part in (query, turned, value)}
        if ranks not in ({3}, {4}):
            continue
        with node.graph.inserting_before(node):
            key = node.graph.call_function(_aten.transpose.int, (turned, -2, -1))
        key.meta = {**turned.meta, "val": turned.meta["val"].transpose(-2, -1)}
        arguments = (query, key, value, mask)
        replace(node, _aten.scaled_dot_product_attention.default, arguments, scale=scale * one * other)
        count += 1
    return count


def _is_scores(node: Any) -> bool:
    return is_call(_factor(node)[0], "matmul")


PATTERNS: dict[str, Callable[[Network], int]] = {
    "layer norms": whole_layer_norm,
    "GELU": whole_gelu,
    "SiLU and its kin": whole_gates,
    "attention": whole_attention,
}
"""Each takes a network whose `meta["val"]` is filled, changes its graph, and says how many it found."""
