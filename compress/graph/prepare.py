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
    with a constant matrix as linear layers, averages over images as pools, padding of maxima in pools, dropouts gone.
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
        elif name == "max_pool2d":
            _without_pad(node)
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


def zero_padded(node: Node) -> bool:
    """Whether the operator puts zeros around its input."""
    name = operator_name(node)
    if name not in ("pad", "constant_pad_nd"):
        return False
    rest = list(node.args[2:])
    mode = rest.pop(0) if rest and name == "pad" else "constant"
    return mode == "constant" and all(each in (0, None) for each in rest) and not node.kwargs


def _without_pad(node: Node) -> None:
    """A maximum over windows that reach out of the image below and on the right, which a file had padded by -inf."""
    pad, kernel, stride, *rest = (*node.args, *[None] * 3)[:6]
    if not isinstance(pad, Node) or operator_name(pad) not in ("pad", "constant_pad_nd") or any(rest):
        return
    pads, value = list(pad.args[1]), pad.args[-1]  # type: ignore[call-overload]
    x = pad.args[0]
    assert isinstance(x, Node)
    if value != float("-inf") or len(pads) != 4 or pads[0] or pads[2] or not stride:
        return
    for size, after, window, step in zip(x.meta["val"].shape[2:], (pads[3], pads[1]), kernel, stride, strict=True):  # type: ignore[arg-type]
        if not isinstance(size, int) or not 0 <= after < window:
            return
        count = -((window - size) // step) + 1  # with a last window that only begins inside
        if count != (size + after - window) // step + 1 or (count - 1) * step >= size:
            return
    node.args = (x, kernel, stride, [0, 0], [1, 1], True)
