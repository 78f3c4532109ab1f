"""Quantizers placed into any graph, by the rules of a target.

*Products* (convolutions and linear layers with constant weights) round their weight and their input. What else is
rounded follows from what a target computes on integers:

- ONNX Runtime computes a convolution on integers only if its result is rounded too, after the activation that it takes
  into its kernel. Such results stay integers through *joins* (additions, concatenations, averages over images and the
  like) as long as something behind them wants integers. Linear layers give floating numbers.
- TensorRT takes an addition behind a convolution into its kernel, so the *other* input of the addition is rounded.

A tensor has one quantizer, whoever reads it; operators that only move numbers have the same one before and behind them,
and so have all inputs and the result of a concatenation. Softmax, norms and what is not named here stay floating.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from penjing.compress.graph.prepare import prepared, zero_padded
from penjing.compress.quantize.targets import GraphSettings, resolve
from penjing.compress.rounding.fake_quantize import ActivationQuantizer, RowQuantizer, WeightQuantizer
from penjing.compress.rounding.formats import activation_format, weight_format
from penjing.core.errors import ConfigError, InputError
from penjing.core.graph.network import Network, operator_name, tensor_at

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
PRODUCTS = (*CONVOLUTIONS, "linear")
MOVES = (
    *("max_pool1d", "max_pool2d", "reshape", "view", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("transpose", "permute", "t", "slice", "select", "narrow", "expand", "pixel_shuffle", "channel_shuffle"),
    *("upsample_nearest1d", "upsample_nearest2d"),
)
"""Operators that commute with rounding: each number of the result is one of the input."""
FUSED = ("relu", "relu6", "hardtanh", "clamp", "clamp_min")
"""Activations that a convolution or an addition takes into its kernel: they only cut off the range."""
UNARY = ("leaky_relu", "sigmoid")
HOLDER = "quantizers"  # the submodule that holds them all


@dataclass(frozen=True)
class Product:
    """A convolution or a linear layer of a quantized graph.

    Attributes:
        name: what `keep` and reports call it, after its weight.
        weight: where its weight is read.
        before, rounding: its quantizers; None where it stays floating.
    """

    name: str
    node: Node
    weight: Node
    before: ActivationQuantizer | None
    rounding: WeightQuantizer | None


def apply_quantization(network: Network, settings: GraphSettings) -> Network:
    """A copy of `network` with quantizers, which are off until `calibrate_graph`; see `prepared` for what else changes.

    Raises:
        ConfigError: the target cannot express the settings; a pattern of `keep` names no layer.
        InputError: the network is quantized already, or has nothing to quantize.
    """
    if network.module.graph.find_nodes(op="call_module"):
        raise InputError("the network is quantized already; load its checkpoint again")
    return place_quantizers(prepared(network), settings)


def place_quantizers(network: Network, settings: GraphSettings) -> Network:
    """`network`, which is `prepared`, with quantizers in its graph, in place.

    Its module is an ordinary one that can be trained: quantizers are submodules that the graph calls.

    Raises:
        ConfigError, InputError: as of `apply_quantization`.
    """
    _Placement(network, settings).apply()
    return network


def products(network: Network) -> Iterator[Product]:
    """Every convolution and linear layer of a quantized graph that has a constant weight, in order."""
    for node in network.module.graph.nodes:
        if operator_name(node) not in PRODUCTS:
            continue
        x, weight = node.args[0], node.args[1]
        before, rounding = quantizer_of(network, x), quantizer_of(network, weight)
        weight = weight.args[0] if isinstance(rounding, WeightQuantizer) else weight
        if isinstance(weight, Node) and weight.op == "get_attr":
            yield Product(
                layer_name(node, weight),
                node,
                weight,
                before if isinstance(before, ActivationQuantizer) else None,
                rounding if isinstance(rounding, WeightQuantizer) else None,
            )


def quantizer_of(network: Network, node: Any) -> nn.Module | None:
    """The quantizer whose result `node` is."""
    if not isinstance(node, Node) or node.op != "call_module":
        return None
    return network.module.get_submodule(str(node.target))


def layer_name(node: Node, weight: Node) -> str:
    """What a product is called: as its weight without ".weight", or as the operator where that says nothing."""
    return str(weight.target).removesuffix(".weight") if str(weight.target) != "weight" else node.name


class _Placement:
    def __init__(self, network: Network, settings: GraphSettings) -> None:
        self.network, self.graph, self.settings = network, network.module.graph, settings
        self.target, activations, weights = resolve(settings.target, settings)
        self.activations, self.weights = activation_format(activations), weight_format(weights)
        self.products = [product.node for product in products(network)]
        names = [self._name(node) for node in self.products]
        for pattern in settings.keep:
            if not any(_matches(name, pattern) for name in names):
                raise ConfigError(f"quantize.keep: {pattern!r} matches no layer; there are {', '.join(names)}")
        kinds = {str(self._weight(node).dtype).removeprefix("torch.") for node in self.products}
        self.products = [node for node in self.products if self._wanted(node)]
        if not self.products and kinds and "float32" not in kinds:
            raise InputError(
                f"the layers of the network are {', '.join(sorted(kinds))}, and integers are made of float32: import "
                "it again with --dtype float32"
            )
        if not self.products:
            raise InputError(
                "the network has no convolution or linear layer with constant weights that can be quantized; "
                f"{'keep leaves out all of them' if names else 'nothing would become smaller'}"
            )
        self.whole = self.target.residual == "both"  # results are rounded, not only inputs
        self.integer: set[Node] = set()  # values that everybody reads rounded
        self.readers: dict[Node, set[Node]] = {}  # values that these operators read rounded
        self.same: dict[Node, Node] = {}  # value → another one with the same quantizer

    def apply(self) -> None:
        """Find out what is rounded, then insert quantizers."""
        for node in self.products:
            self._read(node, node.args[0])
        if self.settings.attention:
            for node in self.graph.nodes:
                if operator_name(node) in ("matmul", "bmm") and all(_floats(value) for value in node.args[:2]):
                    for value in node.args[:2]:
                        self._read(node, value)
        if self.whole:
            self._results()
        else:
            self._shortcuts()
        self._insert()

    def _name(self, node: Node) -> str:
        weight = node.args[1]
        assert isinstance(weight, Node)
        return layer_name(node, weight)

    def _weight(self, node: Node) -> Tensor:
        return tensor_at(self.network.module, str(node.args[1].target))  # type: ignore[union-attr]

    def _wanted(self, node: Node) -> bool:
        weight = self._weight(node)
        small = min(weight.shape[0], weight[0].numel()) < self.target.smallest_product
        kept = any(_matches(self._name(node), pattern) for pattern in self.settings.keep)
        return not (small or kept) and weight.dtype == torch.float32

    def _read(self, node: Node, value: Any) -> None:
        self.readers.setdefault(value, set()).add(node)
        if self.whole and zero_padded(value) and len(value.users) == 1:  # integers are padded
            self._read(value, value.args[0])
            self._share(value)

    def _results(self) -> None:
        """Results of convolutions, and joins between them and what wants integers."""
        could: dict[Node, Node] = {}  # value that may be integer → the operator that makes it so
        for node in self.graph.nodes:
            name, values = operator_name(node), _inputs(node)
            if node in self.products and name in CONVOLUTIONS:
                could[_end(node)] = node
            elif joins(node) and values and all(value in could for value in values):
                could[_end(node) if name == "add" else node] = node
        for value in reversed(list(could)):
            node = could[value]
            if node in self.products:
                self.integer.add(value)
            elif value in self.readers or value in self.integer:
                self.integer.add(value)
                self._share(node)
                for each in _inputs(node):
                    self.integer.add(each)

    def _share(self, node: Node) -> None:
        """One quantizer before and behind an operator that moves numbers."""
        if operator_name(node) in (*MOVES, "cat") or zero_padded(node):
            for value in _inputs(node):
                self.same[self._root(value)] = self._root(node)

    def _root(self, value: Node) -> Node:
        while self.same.get(value, value) is not value:
            value = self.same[value]
        return value

    def _shortcuts(self) -> None:
        """Of each addition behind a convolution, the other input."""
        for node in self.graph.nodes:
            if operator_name(node) != "add" or len(_inputs(node)) != 2:
                continue
            first, second = _inputs(node)
            direct = [
                value in self.products and operator_name(value) in CONVOLUTIONS and len(value.users) == 1
                for value in (first, second)
            ]
            if any(direct):
                self._read(node, second if direct[0] else first)

    def _insert(self) -> None:
        module = self.network.module
        holder = nn.Module()
        module.add_module(HOLDER, holder)
        for value in [node for node in self.graph.nodes if node in self.integer or node in self.readers]:
            name = self._root(value).name
            name += "_" * hasattr(nn.Module(), name)  # a node may be called `to`, a submodule not
            if not hasattr(holder, name):
                holder.add_module(name, self._activation(name))
            with self.graph.inserting_after(value):
                rounded = self.graph.call_module(f"{HOLDER}.{name}", (value,))
            rounded.meta = {"val": value.meta.get("val")}
            for reader in list(value.users):
                if reader is not rounded and (value in self.integer or reader in self.readers[value]):
                    reader.replace_input_with(value, rounded)
        rounded_weights: dict[str, Node] = {}
        for node in self.products:
            weight = node.args[1]
            assert isinstance(weight, Node)
            target = str(weight.target)
            if target not in rounded_weights:
                name = f"{target.replace('.', '_')}_rounded"
                channels = tensor_at(module, target).shape[0]
                holder.add_module(name, WeightQuantizer(channels, self.weights, self.settings.learn_weights))
                with self.graph.inserting_after(weight):
                    rounded_weights[target] = self.graph.call_module(f"{HOLDER}.{name}", (weight,))
                rounded_weights[target].meta = {"val": weight.meta.get("val")}
            node.replace_input_with(weight, rounded_weights[target])
        if self.settings.embedding == "int8":
            self._round_rows(holder)
        self.graph.lint()
        module.recompile()

    def _round_rows(self, holder: nn.Module) -> None:
        """What is looked up in tables; a row's scale follows from the row alone, so no table is rounded as a whole."""
        for node in list(self.graph.nodes):
            if operator_name(node) != "embedding" or not _floats(node):
                continue
            if node.args[0].op == "get_attr":
                holder.add_module(f"{node.name}_rows", RowQuantizer())
                with self.graph.inserting_after(node):
                    rounded = self.graph.call_module(f"{HOLDER}.{node.name}_rows", (node,))
                rounded.meta = {"val": node.meta["val"]}
                node.replace_all_uses_with(rounded, delete_user_cb=lambda user, own=rounded: user is not own)

    def _activation(self, name: str) -> ActivationQuantizer:
        settings = self.settings
        return ActivationQuantizer(
            name, self.activations, settings.observer, settings.percentile, settings.learn_activations
        )


def _matches(name: str, pattern: str) -> bool:
    """Whether `pattern` is of the layer or of a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), pattern) for count in range(1, len(parts) + 1))


def _floats(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(found := value.meta.get("val"), Tensor) and found.is_floating_point()


def _inputs(node: Node) -> list[Node]:
    """The floating tensors that an operator computes with; empty if one of several is a number."""
    if operator_name(node) == "cat":
        return [value for value in node.args[0] if _floats(value)]  # type: ignore[union-attr]
    if operator_name(node) == "add" and not all(map(_floats, node.args[:2])):
        return []
    return [value for value in node.all_input_nodes if _floats(value)]


def _end(node: Node) -> Node:
    """The result of a convolution or an addition, behind the activation that is computed with it."""
    users = list(node.users)
    if len(users) == 1 and operator_name(users[0]) in FUSED and users[0].args[0] is node:
        return users[0]
    return node


def joins(node: Node) -> bool:
    """Whether the operator gives integers from integers; of averages, those over all rows and columns or windows."""
    name = operator_name(node)
    if name == "adaptive_avg_pool2d":
        return list(node.args[1]) == [1, 1]  # type: ignore[arg-type]
    return name in ("add", "cat", "avg_pool2d", *UNARY, *MOVES) or zero_padded(node)
