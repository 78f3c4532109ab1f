"""Attention written out: products, softmax and mask as operators of their own, where each must be seen."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from penjing.core.graph.network import operator_name

_aten = torch.ops.aten
_ORDER = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def open_attention(graph: fx.Graph) -> None:
    """Replace each `scaled_dot_product_attention`, in place; its answers stay, to rounding.

    Args:
        graph: whose `node.meta["val"]` are filled (`propagate`).
    """
    for node in list(graph.nodes):
        if operator_name(node) == "scaled_dot_product_attention":
            given: dict[str, Any] = {**dict(zip(_ORDER, node.args, strict=False)), **node.kwargs}
            if given.get("dropout_p", 0.0):
                continue  # trained with dropout inside, which has no other form
            with graph.inserting_before(node):
                opened = _open(graph, given)
            opened.meta = dict(node.meta)
            node.replace_all_uses_with(opened)
            graph.erase_node(node)


def _open(graph: fx.Graph, given: dict[str, Any]) -> Node:
    query, key, value = given["query"], given["key"], given["value"]
    shape, keys = query.meta["val"].shape, key.meta["val"].shape

    def call(target: Any, *args: Any) -> Node:
        return graph.call_function(target, args)

    if given.get("enable_gqa") and shape[-3] != keys[-3]:
        times = int(shape[-3]) // int(keys[-3])
        key, value = (call(_aten.repeat_interleave.self_int, each, times, -3) for each in (key, value))
    scale = given.get("scale")
    factor = 1 / math.sqrt(int(shape[-1])) if scale is None else float(scale)
    if factor != 1:
        query = call(_aten.mul.Tensor, query, factor)
    scores = call(_aten.matmul.default, query, call(_aten.transpose.int, key, -2, -1))
    mask, boolean = given.get("attn_mask"), False
    if given.get("is_causal"):
        rows, columns = call(_aten.sym_size.int, query, -2), call(_aten.sym_size.int, key, -2)
        whole = graph.call_function(_aten.ones.default, ([rows, columns],), {"dtype": torch.bool})
        mask, boolean = call(_aten.tril.default, whole), True
    elif mask is not None:
        boolean = isinstance(mask.meta["val"], Tensor) and mask.meta["val"].dtype == torch.bool
    if mask is not None and boolean:
        scores = call(_aten.where.ScalarOther, mask, scores, torch.finfo(torch.float32).min)
    elif mask is not None:
        scores = call(_aten.add.Tensor, scores, mask)
    weights = call(_aten.softmax.int, scores, -1)
    if mask is not None and boolean and not given.get("is_causal"):
        weights = call(_aten.where.ScalarOther, mask, weights, 0.0)  # a row that sees nothing answers zero
    return call(_aten.matmul.default, weights, value)
