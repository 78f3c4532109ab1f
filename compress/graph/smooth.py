"""SmoothQuant in any graph (Xiao et al., https://arxiv.org/abs/2211.10438), its strength searched for each input.

One scale for a whole activation wastes most of its steps where few channels are large, as behind the norms and GELU of
transformers. Dividing channel j of the input of linear layers by s_j = max|x_j|^α / max|w_j|^(1 − α) and multiplying
column j of their weights by it leaves the products as they are. The layer or the norm that makes the channels takes the
division where nothing else reads them and every factor comes through unchanged, which is tried on the example: a
linear layer behind attention, which averages its values channel by channel, or a norm in front of the layers alone.
Elsewhere the division is a multiplication of its own, since GELU does not commute with it.
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
from penjing.compress.graph.place import place_quantizers, products
from penjing.compress.quantize.targets import GraphSettings, resolve
from penjing.compress.rounding.fake_quantize import WeightQuantizer
from penjing.compress.rounding.formats import NumberFormat, activation_format, weight_format
from penjing.core.graph.network import Network, operator_name, propagate, set_tensor, tensor_at

STRENGTHS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # α; 0 leaves the input as it is
ROWS = 1024  # of an input, on which strengths are compared
LEAST = 256  # rows: of fewer, the largest of each channel is chance (of 5, SigLIP's cosine fell from 0.985 to 0.956)
WORTH = 0.5  # a product of its own has to leave at most this share of the squared error
_SMALLEST = 1e-5
_CARRIES = (
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "flatten", "unflatten", "squeeze", "unsqueeze"),
    *("contiguous", "clone", "dropout", "matmul", "bmm", "relu", "leaky_relu"),
)
"""Operators that a factor of a channel may come through; whether it does is tried."""


@dataclass(eq=False)
class Input:
    """What several linear layers read, and what was seen of it.

    Attributes:
        readers: linear layers that are rounded, and whose weights nobody else reads.
        lowest, highest: (channels,), at most and at least 0.
        kept: rows (rows, channels), one of `every` of the `count` that were seen.
    """

    node: Node
    readers: list[Node] = field(default_factory=list)
    lowest: Tensor = field(default_factory=lambda: torch.zeros(()))
    highest: Tensor = field(default_factory=lambda: torch.zeros(()))
    kept: list[Tensor] = field(default_factory=list)
    count: int = 0
    every: int = 1

    def see(self, x: Tensor) -> None:
        """Add the values of a batch, (…, channels)."""
        rows = x.detach().flatten(0, -2)
        self.lowest = torch.minimum(self.lowest, rows.amin(0))
        self.highest = torch.maximum(self.highest, rows.amax(0))
        self.kept.append(rows[-self.count % self.every :: self.every].clone())
        self.count += len(rows)
        while sum(map(len, self.kept)) > 3 * ROWS:  # 3: a power of 2 would meet the same places of windows of 128 rows
            self.kept = [torch.cat(self.kept)[::3].clone()]
            self.every *= 3

    def rows(self) -> Tensor:
        """At most `ROWS` (rows, channels), evenly over all that was seen."""
        everything = torch.cat(self.kept)
        return everything[:: -(-len(everything) // ROWS)]


@torch.no_grad()
def smooth(network: Network, batches: Iterable[tuple[Tensor, ...]], settings: GraphSettings) -> dict[str, float]:
    """Smooth inputs of linear layers of `network`, `prepared` and without quantizers, in place; its answers stay, to
    rounding.

    Args:
        batches: its inputs; with fewer than `LEAST` rows of a layer nothing is changed there.

    Returns:
        Input by the name of its first layer → share of the squared error that is left.

    Raises:
        InputError: a weight holds NaN or infinity, or the data do not fit.
    """
    check_weights(network.module)
    found = _inputs(network, settings)
    by_reader = {each.readers[0]: each for each in found}

    def watch(node: Node, args: tuple[Any, ...], _: dict[str, Any], output: Any) -> Any:
        if node in by_reader:
            by_reader[node].see(args[0])
        return output

    look(Watched(network.module, watch).run, batches)
    _, activations, weights = resolve(settings.target, settings)
    formats = activation_format(activations), weight_format(weights)
    left: dict[str, float] = {}
    for each in (each for each in found if each.count >= LEAST):
        columns = [tensor_at(network.module, str(reader.args[1].target)) for reader in each.readers]  # type: ignore[union-attr]
        scale, share = _best(each, columns, *formats)
        each.kept.clear()
        if scale is None:
            continue
        writer = _writer(network, each)
        if writer is None and share > WORTH:
            continue
        for weight in columns:
            weight.mul_(scale)
        if writer is None:
            _divide(network, each, scale)
        else:
            for value in writer:
                value.div_(scale.view(-1, *[1] * (value.dim() - 1)))
        left[str(each.readers[0].args[1].target)] = share  # type: ignore[union-attr]
    network.module.graph.lint()
    network.module.recompile()
    propagate(network)
    return left


def _inputs(network: Network, settings: GraphSettings) -> list[Input]:
    """Everything with three axes or more that linear layers read which will be rounded."""
    rounded = {
        str(each.weight.target)
        for each in products(place_quantizers(network.copy(), settings))
        if each.rounding is not None
    }
    uses = _uses(network)
    found: dict[Node, Input] = {}
    for node in network.module.graph.nodes:
        if operator_name(node) != "linear" or node.meta["val"].dim() < 3:
            continue
        x, weight = node.args[:2]
        if weight.op == "get_attr" and str(weight.target) in rounded and uses[str(weight.target)] == 1:
            found.setdefault(x, Input(x)).readers.append(node)
    return list(found.values())


def _uses(network: Network) -> Counter[str]:
    return Counter(str(node.target) for node in network.module.graph.find_nodes(op="get_attr") for _ in node.users)


def _best(
    seen: Input, columns: list[Tensor], activations: NumberFormat, stored: NumberFormat
) -> tuple[Tensor | None, float]:
    """(channels,) by which the columns of weights are best multiplied, or None for no change; and the share of the
    squared error of the products that it leaves."""
    rows, largest = seen.rows(), torch.maximum(-seen.lowest, seen.highest)
    wanted = [rows @ weight.T for weight in columns]
    widest = torch.stack([weight.abs().amax(0) for weight in columns]).amax(0).clamp(min=_SMALLEST)
    first, best, chosen = 0.0, float("inf"), None
    for strength in STRENGTHS:
        scale = None
        if strength:
            scale = largest.clamp(min=_SMALLEST) ** strength / widest ** (1 - strength)
        factor = torch.ones_like(largest) if scale is None else scale
        step, zero = activations.parameters((seen.lowest / factor).min(), (seen.highest / factor).max())
        x = (activations.store(rows / factor / step, zero) - zero) * step
        size = 0.0
        for weight, product in zip(columns, wanted, strict=True):
            integers, steps = WeightQuantizer(len(weight), stored).integers(weight * factor)
            size += float((x @ (integers.to(torch.float32) * steps[:, None]).T - product).square().sum())
        if scale is None:
            first = size
        if size < best:
            best, chosen = size, scale
    return chosen, best / first if first > 0 else 1.0


def _writer(network: Network, each: Input) -> list[Tensor] | None:
    """Weights and biases whose rows make the channels of the input, and which nothing else reads; None if there are
    none, or a factor changes anything else."""
    node, readers = each.node, set(each.readers)
    if set(node.users) != readers:
        return None
    while operator_name(node) in _CARRIES:
        last = node.args[1] if operator_name(node) in ("matmul", "bmm") else node.args[0]
        if not isinstance(last, Node) or len(last.users) != 1:
            return None
        node = last
    constants = [value for value in node.all_input_nodes if value.op == "get_attr"]
    if operator_name(node) not in ("linear", "layer_norm", "rms_norm") or not constants:
        return None
    uses = _uses(network)
    values = [tensor_at(network.module, str(value.target)) for value in constants]
    channels = len(each.highest)
    if any(uses[str(value.target)] != 1 for value in constants) or any(len(value) != channels for value in values):
        return None
    return values if _comes_through(network, each, values) else None


def _comes_through(network: Network, each: Input, values: list[Tensor]) -> bool:
    """Whether powers of two in the rows of `values` are found in the channels of the input, bit by bit."""
    factor = torch.arange(len(each.highest)).remainder(7).sub(3).float().exp2()
    before = _value(network, each.node)
    for value in values:
        value.mul_(factor.view(-1, *[1] * (value.dim() - 1)))
    after = _value(network, each.node)
    for value in values:
        value.div_(factor.view(-1, *[1] * (value.dim() - 1)))
    return torch.equal(before * factor, after)


def _value(network: Network, wanted: Node) -> Tensor:
    """What `wanted` gives on the example."""
    found: list[Tensor] = []

    def watch(node: Node, _: tuple[Any, ...], __: dict[str, Any], output: Any) -> Any:
        if node is wanted:
            found.append(output)
        return output

    Watched(network.module, watch).run(*network.inputs())
    return found[0]


def _divide(network: Network, each: Input, scale: Tensor) -> None:
    """A product of its own in front of the readers."""
    module = network.module
    name = f"smoothing.{each.node.name}"
    set_tensor(module, name, 1 / scale)
    with module.graph.inserting_before(each.readers[0]):
        factor = module.graph.create_node("get_attr", name)
        product = module.graph.call_function(torch.ops.aten.mul.Tensor, (each.node, factor))
    for reader in each.readers:
        reader.replace_input_with(each.node, product)
