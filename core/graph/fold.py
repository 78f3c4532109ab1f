"""Batch norms in evaluation become part of the convolution or linear layer before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import Node

from penjing.core.graph.network import Network, operator_name, set_tensor, tensor_at

FOLDABLE = ("conv1d", "conv2d", "conv3d", "linear")
"""Operators with arguments (x, weight, bias): the weight's axis 0 and the result's axis 1 are channels."""
BATCH_NORM = ("x", "weight", "bias", "mean", "var", "training", "momentum", "eps")


@torch.no_grad()
def fold_batch_norms(network: Network) -> int:
    """Fold every batch norm that alone reads a convolution or a linear layer, in place; answers stay, to rounding.

    Args:
        network: in evaluation mode, its `node.meta["val"]` filled (`propagate`).

    Returns:
        How many.
    """
    module, count = network.module, 0
    for norm in list(module.graph.nodes):
        if operator_name(norm) != "batch_norm":
            continue
        given = dict(zip(BATCH_NORM, norm.args, strict=False))
        layer = given["x"]
        if operator_name(layer) not in FOLDABLE or len(layer.users) != 1 or layer.args[1].op != "get_attr":
            continue
        if operator_name(layer) == "linear" and layer.meta["val"].dim() != 2:
            continue  # whose channels are not on axis 1
        if len(layer.args) > 2 and isinstance(layer.args[2], Node) and layer.args[2].op != "get_attr":
            continue  # a bias that is computed
        values = {name: _value(module, given[name]) for name in ("weight", "bias", "mean", "var")}
        mean, var = values["mean"], values["var"]
        if mean is None or var is None or given["training"]:
            continue
        factor = (var.double() + given["eps"]).rsqrt()
        factor = factor if values["weight"] is None else factor * values["weight"].double()
        shift = -mean.double() * factor
        shift = shift if values["bias"] is None else shift + values["bias"].double()
        weight = tensor_at(module, layer.args[1].target)
        old = _value(module, layer.args[2] if len(layer.args) > 2 else None)
        bias = shift if old is None else shift + old.double() * factor
        folded = weight.double() * factor.view(-1, *[1] * (weight.dim() - 1))
        name = str(layer.args[1].target)
        layer.update_arg(1, new_weight(network, name, folded.to(weight.dtype), layer))
        called = f"{name.removesuffix('weight')}bias" if name.endswith("weight") else f"{name}_bias"
        summand = new_weight(network, called, bias.to(weight.dtype), layer)
        layer.args = (*layer.args[:2], summand, *layer.args[3:])
        norm.replace_all_uses_with(layer)
        module.graph.erase_node(norm)
        count += 1
    drop_unread(network)
    return count


def new_weight(network: Network, name: str, value: Tensor, reader: Node) -> Node:
    """A parameter called `name`, or nearly so where other operators read one of that name, in front of `reader`."""
    module = network.module
    held = module.graph.find_nodes(op="get_attr")
    while any(user is not reader for node in held if node.target == name for user in node.users):
        name += "_"
    set_tensor(module, name, nn.Parameter(value, requires_grad=value.is_floating_point()))
    with module.graph.inserting_before(reader):
        node = module.graph.create_node("get_attr", name)
    node.meta["val"] = value
    return node


def drop_unread(network: Network) -> None:
    """Leave out what no output needs, and weights that no operator reads; `module` is compiled anew."""
    module = network.module
    module.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    read = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    for name in [name for name, _ in (*module.named_parameters(), *module.named_buffers())]:
        if name not in read and not _of_called(module, name):
            path, _, leaf = name.rpartition(".")
            delattr(module.get_submodule(path), leaf)
    module.graph.lint()
    module.recompile()


def _of_called(module: nn.Module, name: str) -> bool:
    """Whether the tensor belongs to a module that the graph calls."""
    graph = module.graph
    called = {str(node.target) for node in graph.find_nodes(op="call_module")}  # type: ignore[union-attr,operator]
    return any(name.startswith(f"{prefix}.") for prefix in called)


def _value(module: nn.Module, node: object) -> Tensor | None:
    return tensor_at(module, str(node.target)) if isinstance(node, Node) and node.op == "get_attr" else None
