"""What is done to a floating graph before quantizers are placed: each rule of placement then meets one form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from penjing.core.graph.attention import open_attention
from penjing.core.graph.fold import drop_unread, fold_batch_norms, new_weight
from penjing.core.graph.network import Network, operator_name, propagate, tensor_at

_aten = torch.ops.aten


def prepared(network: Network) -> Network:
    """A copy in evaluation mode that answers the same, to rounding: batch norms folded, attention written out, products
    with a constant matrix as linear layers, averages over images as pools, dropouts gone.
    """
    made = network.copy()
    made.module.eval()
    propagate(made)
    graph = made.module.graph
    open_attention(graph)
    for node in list(graph.nodes):
        name = operator_name(node)
        if name in ("dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif name in ("view", "_unsafe_view"):  # which may rest on a copy that is left out
            node.target = _aten.reshape.default
        elif name in ("matmul", "mm", "addmm"):
            _as_linear(made, node)
        elif name == "mean":
            _as_pool(made, node)
    made.module.recompile()
    propagate(made)
    fold_batch_norms(made)
    drop_unread(made)
    propagate(made)
    return made


def _as_linear(network: Network, node: Node) -> None:
    """x @ W, and bias + x @ W, of a constant matrix W."""
    first = 1 if operator_name(node) == "addmm" else 0
    x, weight = node.args[first], node.args[first + 1]
    if not (isinstance(x, Node) and isinstance(weight, Node) and weight.op == "get_attr"):
        return
    value = tensor_at(network.module, str(weight.target))
    bias = node.args[0] if first else None
    if value.dim() != 2 or x.meta["val"].dim() < 2 or node.kwargs:
        return
    if isinstance(bias, Node) and (bias.op != "get_attr" or bias.meta["val"].shape != value.shape[1:]):
        return
    turned = new_weight(network, str(weight.target), value.detach().t().contiguous(), node)
    with network.module.graph.inserting_before(node):
        linear = network.module.graph.call_function(_aten.linear.default, (x, turned, bias))
    linear.meta = dict(node.meta)
    node.replace_all_uses_with(linear)
    network.module.graph.erase_node(node)


def _as_pool(network: Network, node: Node) -> None:
    """The mean over the rows and columns of images."""
    x, axes, *rest = node.args
    value = x.meta.get("val") if isinstance(x, Node) else None
    if not isinstance(value, Tensor) or value.dim() != 4 or not isinstance(axes, (list, tuple)) or node.kwargs:
        return
    if sorted(axis % 4 for axis in axes) != [2, 3]:  # type: ignore[operator]
        return
    graph = network.module.graph
    with graph.inserting_before(node):
        pooled = graph.call_function(_aten.adaptive_avg_pool2d.default, (x, [1, 1]))
        if not (rest and rest[0]):
            pooled = graph.call_function(_aten.flatten.using_ints, (pooled, 1))
    node.replace_all_uses_with(pooled)
    graph.erase_node(node)
