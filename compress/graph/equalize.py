"""Cross-layer equalisation: the channels of each activation are brought to similar ranges before it is quantized.

An activation has one scale for all its channels, so that one wide channel leaves few levels to the others. A positive
factor passes through ReLU, pooling, addition and padding with zeros: what writes a channel is divided by a factor, what
reads it is multiplied. As in https://arxiv.org/abs/1906.04721 (section 4.1) the factor √(a / w) makes the channel's
largest activation a as large as the largest weight w that reads it. Factors are powers of two, so the floating network
computes the same bits as before. Channels that anything else reads or writes keep their ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from penjing.compress.graph.calibrate import Watched, check_weights, look
from penjing.compress.graph.place import CONVOLUTIONS, PRODUCTS
from penjing.compress.graph.prepare import zero_padded
from penjing.core.errors import InputError
from penjing.core.graph.network import Network, operator_name, tensor_at

LARGEST_EXPONENT = 20  # of a factor: weights stay far from float32's limits
PASSING = (
    *("relu", "leaky_relu", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool2d"),
    *("dropout", "clone", "contiguous"),
)
"""Operators that a positive factor of a channel passes through."""
FLAT = ("flatten", "view", "_unsafe_view", "reshape", "squeeze")
"""Operators that may leave one number of each channel."""


@dataclass(eq=False)
class Link:
    """Channels with one factor each: all layers that write them, all that read them.

    Attributes:
        axis: of the channels; 1, or -1 of tokens.
        free: whether nothing else reads or writes them.
    """

    axis: int
    writers: list[Node] = field(default_factory=list)
    readers: list[Node] = field(default_factory=list)
    free: bool = True


def links(network: Network) -> list[Link]:
    """Every set of channels whose factors are free.

    Args:
        network: `prepared`, with the shapes of `propagate`.
    """
    return _Links(network).found()


@torch.no_grad()
def equalize(network: Network, batches: Iterable[tuple[Tensor, ...]]) -> None:
    """Equalise `network`, `prepared` and without quantizers, in place; its outputs stay as they are, bit by bit.

    Args:
        batches: its inputs, on which the channels' ranges are seen.

    Raises:
        InputError: a weight or an activation holds NaN or infinity, or the data do not fit.
    """
    module = network.module
    check_weights(module)
    found = links(network)
    axes = {reader: link.axis for link in found for reader in link.readers}
    ranges: dict[Node, Tensor] = {}

    def watch(node: Node, args: tuple[Any, ...], _: dict[str, Any], output: Any) -> Any:
        if node in axes:
            largest = args[0].abs().transpose(0, axes[node]).flatten(1).amax(1)
            ranges[node] = torch.maximum(ranges[node], largest) if node in ranges else largest
        return output

    look(Watched(module, watch).run, batches)
    for link in found:
        activation = torch.stack([ranges[reader] for reader in link.readers]).amax(0)
        if not bool(activation.isfinite().all()):
            raise InputError(
                "equalize: an activation holds NaN or infinity; check the checkpoint (does it classify?) and the "
                "calibration data"
            )
        columns = [_columns(network, reader) for reader in link.readers]
        weight = torch.stack([each.abs().amax((1, 3)).flatten() for each in columns]).amax(0)
        factor = _powers(activation, weight)
        for writer in link.writers:
            for value in _tensors(writer):
                own = tensor_at(module, str(value.target))
                own.div_(factor.view(-1, *[1] * (own.dim() - 1)))
        for each in columns:
            each.mul_(factor.view(each.shape[0], 1, each.shape[2], 1))


class _Links:
    """Goes through a graph once; values that share channels share a link."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.of: dict[Node, Link] = {}
        self.same: dict[Link, Link] = {}
        self.uses = Counter(
            str(node.target) for node in network.module.graph.find_nodes(op="get_attr") for _ in node.users
        )

    def found(self) -> list[Link]:
        """See `links`."""
        for node in self.network.module.graph.nodes:
            if operator_name(node) in PRODUCTS:
                self._product(node)
            elif node.op != "get_attr":
                self._other(node)
        roots = dict.fromkeys(self._root(link) for link in self.of.values())
        return [link for link in roots if link.free and link.writers and link.readers]

    def _product(self, node: Node) -> None:
        x = node.args[0]
        assert isinstance(x, Node)
        convolution = operator_name(node) in CONVOLUTIONS
        axis = 1 if convolution or node.meta["val"].dim() == 2 else -1
        own = all(each.op == "get_attr" and self.uses[str(each.target)] == 1 for each in _tensors(node))
        if x in self.of:
            link = self._root(self.of[x])
            link.free &= own and link.axis == axis
            link.readers.append(node)
        if own:
            self.of[node] = Link(axis, writers=[node])

    def _other(self, node: Node) -> None:
        known = [value for value in node.all_input_nodes if value in self.of]
        name = operator_name(node)
        if name in PASSING or self._flattens(node) or self._pads(node):
            if known:
                self.of[node] = self.of[known[0]]
        elif name == "add" and self._plain(node, known):
            self.of[node] = self._joined(*(self._root(self.of[value]) for value in known))
        else:
            for value in known:
                self._root(self.of[value]).free = False

    def _plain(self, node: Node, known: list[Node]) -> bool:
        """Whether two values with channels of the same kind are added as they are."""
        if node.kwargs or len(node.args) != 2 or [*known] != list(dict.fromkeys(node.args)) or len(known) != 2:
            return False
        one, other = (self._root(self.of[value]) for value in known)
        return one.axis == other.axis and known[0].meta["val"].shape == known[1].meta["val"].shape

    def _flattens(self, node: Node) -> bool:
        """Whether (N, C, 1, …) becomes (N, C)."""
        x = node.args[0] if node.args else None
        if operator_name(node) not in FLAT or not isinstance(x, Node) or x not in self.of:
            return False
        before, after = x.meta["val"].shape, node.meta["val"].shape
        return self._root(self.of[x]).axis == 1 and len(after) == 2 and (before[1], *before[2:]) == (
            after[1], *[1] * (len(before) - 2),
        )  # fmt: skip

    def _pads(self, node: Node) -> bool:
        """Whether rows and columns are padded with zeros."""
        if not zero_padded(node):
            return False
        x, pads = node.args[:2]
        return isinstance(x, Node) and len(pads) <= 2 * (x.meta["val"].dim() - 2)  # type: ignore[arg-type]

    def _root(self, link: Link) -> Link:
        while link in self.same:
            link = self.same[link]
        return link

    def _joined(self, one: Link, other: Link) -> Link:
        if one is not other:
            one.writers += other.writers
            one.readers += other.readers
            one.free &= other.free
            self.same[other] = one
        return one


def _tensors(node: Node) -> list[Node]:
    """Weight and bias of a product."""
    return [value for value in node.args[1:3] if isinstance(value, Node)]


def _columns(network: Network, reader: Node) -> Tensor:
    """A view (groups, outputs of a group, inputs of a group, kernel) of the weight."""
    weight = tensor_at(network.module, str(reader.args[1].target))  # type: ignore[union-attr]
    groups = 1
    if operator_name(reader) in CONVOLUTIONS:
        groups = int(reader.args[6]) if len(reader.args) > 6 else 1  # type: ignore[arg-type]
    return weight.view(groups, weight.shape[0] // groups, weight.shape[1], -1)


def _powers(activation: Tensor, weight: Tensor) -> Tensor:
    """2^k next to √(activation / weight); 1 for channels that are dead or that nobody reads."""
    alive = (activation > 0) & (weight > 0)
    exponent = 0.5 * (activation.clamp(min=1e-30).log2() - weight.clamp(min=1e-30).log2())
    return torch.where(alive, exponent.round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT), 0.0).exp2()
