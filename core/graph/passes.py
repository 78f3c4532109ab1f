"""What makes a graph smaller without another answer; each pass is checked on the network's example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from penjing.core.errors import InputError
from penjing.core.graph.compare import CLOSE, farthest, widened
from penjing.core.graph.network import Network, operator_name, propagate, set_tensor, tensor_at, tensors_of
from penjing.core.graph.patterns import PATTERNS, is_call, sides

LARGEST_CONSTANT = 1 << 20
_RANDOM = ("dropout", "feature_dropout", "alpha_dropout", "rrelu")
_aten = torch.ops.aten


@dataclass(frozen=True)
class Gain:
    """What a pass did: how many places it changed, and how many operators there were before and after."""

    name: str
    changed: int
    before: int
    after: int

    def described(self) -> dict[str, Any]:
        """For manifests."""
        return asdict(self)


def simplify(network: Network) -> tuple[Network, list[Gain]]:
    """The network without what changes nothing, layers that were written out made whole; `network` stays.

    A pass whose result answers otherwise is left out: its gain then says 0.

    Raises:
        InputError: the graph does not run.
    """
    gains = []
    shown = _examples(network)
    still = _answers(network, shown)
    propagate(network)  # a copy keeps what it puts beside the nodes
    for name, change in PASSES.items():
        tried = network.copy()
        changed = change(tried)
        if not changed:
            continue
        graph = tried.module.graph
        graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        graph.lint()
        tried.module.recompile()
        _drop_unread(tried)
        if farthest(_answers(tried, shown), still) <= CLOSE or _same_in_float64(tried, network, shown):
            gains.append(Gain(name, changed, _size(network), _size(tried)))
            network = tried
            propagate(network)
        else:
            gains.append(Gain(name, 0, _size(network), _size(network)))
    return network, gains


def _examples(network: Network) -> list[tuple[Tensor, ...]]:
    """The example, and one of another batch: what holds for one size only is no identity."""
    inputs = network.inputs()
    if not network.config.batched:
        return [inputs]
    return [inputs, tuple(torch.cat([value, value[:1]]) for value in inputs)]


def _answers(network: Network, shown: list[tuple[Tensor, ...]]) -> list[Tensor]:
    with torch.no_grad():
        return [answer for inputs in shown for answer in network(*inputs)]


def _same_in_float64(tried: Network, network: Network, shown: list[tuple[Tensor, ...]]) -> bool:
    """Whether the two compute the same but for rounding, which another order of operators changes."""
    after, before = (widened(one, torch.float64) for one in (tried, network))
    try:
        return all(farthest(after(inputs), before(inputs)) <= CLOSE for inputs in shown)
    except InputError:
        return False  # an operator that has no 64 bits: not known to be the same


def _size(network: Network) -> int:
    return sum(node.op == "call_function" for node in network.module.graph.nodes)


def _drop_unread(network: Network) -> None:
    """Take out weights that no operator reads any more."""
    read = {str(node.target) for node in network.module.graph.nodes if node.op == "get_attr"}
    for name in tensors_of(network.module).keys() - read:
        path, _, leaf = name.rpartition(".")
        delattr(network.module.get_submodule(path), leaf)


def fold_constants(network: Network) -> int:
    """Compute once what depends on no input and on nothing that is trained."""
    module, known, count = network.module, dict[Node, Tensor](), 0
    trained = dict(module.named_parameters(remove_duplicate=False))
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and str(node.target) not in trained:
            known[node] = tensor_at(module, str(node.target))
        if not operator_name(node) or operator_name(node) in _RANDOM or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.meta["val"].numel() > LARGEST_CONSTANT or any(part not in known for part in node.all_input_nodes):
            continue
        args, named = map_arg((node.args, node.kwargs), known.__getitem__)
        with torch.no_grad():
            known[node] = node.target(*args, **named)
    for node, value in known.items():
        if node.op == "get_attr" or all(user in known for user in node.users):
            continue
        name = f"constants.{node.name}"
        set_tensor(module, name, value.contiguous())
        with module.graph.inserting_before(node):
            held = module.graph.get_attr(name)
        held.meta = dict(node.meta)
        node.replace_all_uses_with(held)
        count += 1
    return count


def merge_duplicates(network: Network) -> int:
    """Compute once what is computed twice from the same."""
    seen: dict[Any, Node] = {}
    count = 0
    for node in list(network.module.graph.nodes):
        if node.op not in ("call_function", "get_attr") or operator_name(node) in _RANDOM:
            continue
        key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            network.module.graph.erase_node(node)
            count += node.op == "call_function"
    return count


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((key, _frozen(part)) for key, part in value.items()))
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else (type(value), value)


def drop_identities(network: Network) -> int:
    """Take out what gives back its argument: shapes that stay, orders of axes undone, `x + 0`, `x · 1`."""
    count = 0
    for node in list(network.module.graph.nodes):
        if _turns_twice(node):
            count += 1
        source = _same_as(node)
        if source is not None and source.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(source)
            network.module.graph.erase_node(node)
            count += 1
    return count


def _same_as(node: Any) -> Node | None:
    name, source = operator_name(node), node.args[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
        return None
    value, before = node.meta["val"], source.meta["val"]
    stays = isinstance(value, Tensor) and value.shape == before.shape
    fixed = not any(part.op != "get_attr" for part in node.all_input_nodes[1:])
    if name in ("reshape", "view", "expand", "flatten", "squeeze", "unsqueeze") and stays and fixed:
        wanted = node.args[1] if len(node.args) > 1 else ()
        told = [size for size in wanted if isinstance(size, int)] if isinstance(wanted, (list, tuple)) else []
        # a batch of the example must not be taken for one of every call
        return source if name not in ("reshape", "view") or (told.count(-1) <= 1 and _fits_any(told, before)) else None
    if name == "permute":
        return source if [axis % before.dim() for axis in node.args[1]] == list(range(before.dim())) else None  # type: ignore[union-attr]
    if name == "transpose":
        return source if node.args[1] % before.dim() == node.args[2] % before.dim() else None  # type: ignore[operator]
    if name in ("to", "_to_copy", "type_as") and stays:
        return source
    number = node.args[1] if len(node.args) == 2 and not node.kwargs else None
    if isinstance(number, (int, float)) and stays and number == {"add": 0, "sub": 0, "mul": 1, "div": 1}.get(name):
        return source
    return None


def _fits_any(told: list[int], before: Tensor) -> bool:
    """Whether the sizes that are said are those of the argument at any batch: all of them, or all but the -1."""
    return len(told) == before.dim()


def _turns_twice(node: Any) -> bool:
    """Join an order of axes with the one before it, in place."""
    if not is_call(node, "permute", "transpose") or not is_call(node.args[0], "permute", "transpose"):
        return False
    inner: Any = node.args[0]
    source = inner.args[0]
    rank = source.meta["val"].dim()
    first, second = _order(inner, rank), _order(node, rank)
    node.target = _aten.permute.default
    node.args = (source, [first[axis] for axis in second])
    node.kwargs = {}
    return True


def _order(node: Any, rank: int) -> list[int]:
    if operator_name(node) == "permute":
        return [axis % rank for axis in node.args[1]]  # type: ignore[union-attr]
    order = list(range(rank))
    one, other = node.args[1] % rank, node.args[2] % rank  # type: ignore[operator]
    order[one], order[other] = order[other], order[one]
    return order


def join_biases(network: Network) -> int:
    """Make what is added behind a linear layer or a convolution its bias."""
    module, count = network.module, 0
    for node in list(module.graph.nodes):
        if not is_call(node, "add"):
            continue
        for layer, bias in sides(node):
            if not is_call(layer, "linear", "conv1d", "conv2d", "conv3d") or len(layer.users) != 1:
                continue
            flat = _flat_bias(network, layer, bias)
            if flat is None or (len(layer.args) > 2 and layer.args[2] is not None) or "bias" in layer.kwargs:
                continue
            name = str(bias.target)
            if flat.shape != tensor_at(module, name).shape:
                name = f"{name}_flat"
                set_tensor(module, name, nn.Parameter(flat.clone()))
            with module.graph.inserting_before(layer):
                held = module.graph.get_attr(name)
            layer.args = (*layer.args[:2], held, *layer.args[3:])
            node.replace_all_uses_with(layer)
            module.graph.erase_node(node)
            count += 1
            break
    return count


def _flat_bias(network: Network, layer: Node, bias: Any) -> Tensor | None:
    if not isinstance(bias, Node) or bias.op != "get_attr":
        return None
    value = tensor_at(network.module, str(bias.target))
    result = layer.meta["val"]
    if not isinstance(value, nn.Parameter) or value.dim() > result.dim():
        return None
    axis = -1 if operator_name(layer) == "linear" else 1 - result.dim()
    wide = value.dim() >= -axis and value.shape[axis] == result.shape[axis] == value.numel()
    return value.detach().reshape(-1) if wide else None


PASSES: dict[str, Callable[[Network], int]] = {
    "constants": fold_constants,
    "duplicates": merge_duplicates,
    "biases": join_biases,
    **PATTERNS,
    "identities": drop_identities,
}
"""In the order in which they run."""
