"""A quantized graph with its numbers as they are stored: what is exported, and what torch can compute as well."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from penjing.compress.graph.place import HOLDER, PRODUCTS, Product, products, quantizer_of
from penjing.compress.quantize.folded import Folded, bounded
from penjing.compress.quantize.targets import TARGETS, TargetName
from penjing.compress.rounding.fake_quantize import ActivationQuantizer, RowQuantizer
from penjing.compress.rounding.stored import QUANTIZED, WIDENED, ZERO_TYPES
from penjing.core.errors import InputError
from penjing.core.graph.fold import drop_unread
from penjing.core.graph.network import Network, operator_name, set_tensor, tensor_at

_aten = torch.ops.aten


@torch.no_grad()
def stored(network: Network, target: TargetName) -> Network:
    """A copy of a quantized and calibrated `network` whose weights are integers, widened where they are read.

    Raises:
        InputError: a quantizer was never calibrated.
    """
    made = network.copy()
    _Store(made, TARGETS[target].bias == "int32").run()
    return made


def folded(network: Network, product: Product) -> Folded:
    """What is stored of a product that is rounded: integers, scales, and its bias in floating point.

    Scales are bounded so that an INT32 can hold the bias, whatever it is stored as: ONNX Runtime makes floating biases
    of convolutions such integers, and does not look whether they fit.
    """
    weight = tensor_at(network.module, str(product.weight.target))
    given = product.node.args[2] if len(product.node.args) > 2 else None
    bias = torch.zeros(len(weight))
    if isinstance(given, Node) and given.op == "get_attr":  # one that is computed is added in floating point
        bias = tensor_at(network.module, str(given.target)).detach().clone()
    assert product.rounding is not None
    assert product.before is not None
    integers, scale = product.rounding.integers(weight)
    step = None if _is_matrix(product.node) else product.before.positive_scale().detach()
    return bounded(product.rounding, integers, scale, bias, step)


class _Store:
    def __init__(self, network: Network, integer_biases: bool) -> None:
        self.network, self.graph, self.integer_biases = network, network.module.graph, integer_biases
        self.constants: dict[str, Tensor] = {}

    def run(self) -> None:
        """Replace every quantizer that the graph calls."""
        for product in list(products(self.network)):
            if product.rounding is not None:
                self._product(product)
        for node in list(self.graph.find_nodes(op="call_module")):
            quantizer = quantizer_of(self.network, node)
            if isinstance(quantizer, ActivationQuantizer):
                self._activation(node, quantizer)
            elif isinstance(quantizer, RowQuantizer):
                self._rows(node, quantizer)
        for name, value in self.constants.items():
            set_tensor(self.network.module, name, value)
        drop_unread(self.network)
        delattr(self.network.module, HOLDER)

    def _activation(self, node: Node, quantizer: ActivationQuantizer) -> None:
        if not bool(quantizer.ready):
            raise InputError(f"the range of {quantizer.name} is unknown; calibrate the network before it is exported")
        zero = quantizer.zero_point.to(ZERO_TYPES[quantizer.format.name])
        with self.graph.inserting_before(node):
            scale = self._constant(f"rounding.{quantizer.name}.scale", quantizer.positive_scale().detach())
            pair = (node.args[0], scale, self._constant(f"rounding.{quantizer.name}.zero", zero))
            rounded = self.graph.call_function(QUANTIZED, pair)
        node.replace_all_uses_with(rounded)
        self.graph.erase_node(node)

    def _product(self, product: Product) -> None:
        node, given = product.node, product.node.args[2] if len(product.node.args) > 2 else None
        matrix = _is_matrix(node)
        integer_bias = self.integer_biases and not matrix and isinstance(given, Node) and given.op == "get_attr"
        found = folded(self.network, product)
        name = str(product.weight.target)
        with self.graph.inserting_before(node):
            if matrix:
                weight = self._widened(name, found.weight.t().contiguous(), found.scale, 1)
                result = self.graph.call_function(_aten.matmul.default, (node.args[0], weight))
                if isinstance(given, Node) and (given.op != "get_attr" or bool(found.bias.any())):
                    result = self.graph.call_function(_aten.add.Tensor, (result, given))
                node.replace_all_uses_with(result)
                self.graph.erase_node(node)
                return
            node.update_arg(1, self._widened(name, found.weight, found.scale, 0))
            if integer_bias:
                assert isinstance(given, Node)
                assert product.before is not None
                step = (product.before.positive_scale().detach() * found.scale).to(torch.float32)
                integers = (found.bias.double() / step.double()).round().to(torch.int32)
                node.update_arg(2, self._widened(str(given.target), integers, step, 0))

    def _rows(self, node: Node, quantizer: RowQuantizer) -> None:
        """Integers and scales are looked up apart, so that no table is widened."""
        looked = node.args[0]
        assert isinstance(looked, Node)
        table, indices = looked.args[:2]
        assert isinstance(table, Node)
        integers, scale = quantizer.integers(tensor_at(self.network.module, str(table.target)))
        node.replace_input_with(looked, indices)  # type: ignore[arg-type]
        self.graph.erase_node(looked)
        with self.graph.inserting_before(node):
            held = self._constant(str(table.target), integers), self._constant(f"{table.target}_scale", scale[:, None])
            rows, steps = (self.graph.call_function(_aten.embedding.default, (each, indices)) for each in held)
            wide = self.graph.call_function(_aten.to.dtype, (rows, torch.float32))
            product = self.graph.call_function(_aten.mul.Tensor, (wide, steps))
        node.replace_all_uses_with(product)
        self.graph.erase_node(node)

    def _widened(self, name: str, value: Tensor, scale: Tensor, axis: int) -> Node:
        constants = self._constant(name, value), self._constant(f"{name}_scale", scale)
        whole = value.dtype == torch.int32
        zero = None if whole else self._constant(f"{name}_zero", torch.zeros(len(scale)).to(value.dtype))
        return self.graph.call_function(WIDENED, (*constants, zero, axis))

    def _constant(self, name: str, value: Tensor) -> Node:
        """A constant called `name`, or nearly so where one with other numbers stays."""
        held = self.graph.find_nodes(op="get_attr")
        while (name in self.constants and not _equal(self.constants[name], value)) or any(
            name not in self.constants and node.target == name and not _rounds(user)
            for node in held
            for user in node.users
        ):
            name += "_"
        self.constants[name] = value
        return self.graph.create_node("get_attr", name)


def _is_matrix(node: Node) -> bool:
    """Whether a product becomes a MatMul, which takes no bias."""
    return operator_name(node) == "linear" and node.meta["val"].dim() > 2


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _rounds(user: Node) -> bool:
    """Whether the operator reads what is replaced: a quantizer its weight, or a product its bias."""
    return user.op == "call_module" or operator_name(user) in PRODUCTS
