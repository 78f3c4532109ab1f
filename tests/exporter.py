"""torch's exporters in tests: what they make again and again is made once. The conftest of all has the fixtures."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion
from torch.utils import _pytree as pytree

from penjing.compress.graph import own
from penjing.compress.prune import graph
from penjing.core.graph.network import GraphModule, Network, set_tensor, tensors_of


@pytest.fixture(scope="session", autouse=True)
def one_table_of_translators() -> Iterator[None]:
    """torch's exporter builds its table of hundreds of translators anew for each network, which takes longer than many
    of these networks. Here it is built once, and each export gets a copy."""
    build, built = ONNXRegistry.from_torchlib, dict[int, ONNXRegistry]()

    def copied(opset_version: int) -> ONNXRegistry:
        if opset_version not in built:
            built[opset_version] = build(opset_version)
        registry = ONNXRegistry()
        registry._opset_version = opset_version
        registry.functions = {name: list(found) for name, found in built[opset_version].functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(copied))
        yield


@pytest.fixture(scope="session", autouse=True)
def types_promoted_where_they_differ() -> Iterator[None]:
    """torch's exporter runs a whole graph on fake tensors to find where types differ: a third of a translation.
    Here a node's known result is taken unless something before it was promoted."""
    run_node = type_promotion._TypePromotionInterpreter.run_node

    def run_what_changed(self: Any, n: Node) -> Any:
        changed = self.__dict__.setdefault("_changed", set())
        if n.op == "call_function" and "val" in n.meta and changed.isdisjoint(n.all_input_nodes):
            before = n.args, n.kwargs, n.target
            if rule := type_promotion.get_type_promotion_rule(n, self.type_promotion_table):
                with self._set_current_node(n):
                    self._maybe_promote_node(n, rule)
            if (n.args, n.kwargs, n.target) == before:
                return n.meta["val"]
            changed.add(n)
            return Interpreter.run_node(self, n)
        if n.op == "call_function":
            changed.add(n)
        return run_node(self, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type_promotion._TypePromotionInterpreter, "run_node", run_what_changed)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_trace_of_own_networks() -> Iterator[None]:
    """A network of penjing's own that has a config is traced once for it: others of that config are the same graph with
    weights of their own."""
    trace, traced = own.from_torch, dict[str, Network]()

    def traced_once(model: nn.Module, *example: Any, **options: Any) -> Network:
        if (key := _key(model, (example, options))) is None:
            return trace(model, *example, **options)
        weights = tensors_of(model)
        if key not in traced:
            traced[key] = trace(model, *example, **options)
        network, root = traced[key], nn.Module()
        for name, constant in tensors_of(network.module).items():
            set_tensor(root, name, weights.get(name, constant))
        return replace(network, module=GraphModule(root, copy.deepcopy(network.module.graph)).eval())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "from_torch", traced_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_analysis_of_own_networks() -> Iterator[None]:
    """What pruning looks for the groups in is exported once for a config: where weights stand is the same."""
    export, exported = graph._export, dict[str, Any]()

    def exported_once(model: nn.Module, example: tuple[Any, ...]) -> Any:
        if (key := _key(model, example)) is None:
            return export(model, example)
        if key not in exported:
            exported[key] = export(model, example)
        return exported[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "_export", exported_once)
        yield


def _key(model: nn.Module, others: Any) -> str | None:
    """What decides the graph of a network of penjing's own: its config and modules, and all shapes; None: it has no
    config."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    shapes = pytree.tree_map_only(Tensor, lambda each: (each.shape, each.dtype), (tensors_of(model), others))
    return repr((config, [type(module) for module in model.modules()], shapes))
