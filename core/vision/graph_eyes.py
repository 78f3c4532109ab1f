"""Any network of images as the encoder of a decoder that sees, or as an image tower: a graph up to one of its results.

The graph is part of the configuration, so that a folder with such a network is read as any other is. Shapes: N images,
P places of a result (its rows and columns, its tokens, or one), E numbers of each.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor, fx, nn
from torch.fx import Node

from penjing.core.config import Config
from penjing.core.errors import InputError
from penjing.core.graph.config import Pixels
from penjing.core.graph.network import GraphModule, Network, operator_name, propagate, tensor_at
from penjing.core.graph.store import dump_graph, load_graph

MOST_NUMBERS = 1 << 33  # of all weights: a damaged file may say anything


class Stored(Config):
    """A weight or a constant of a graph."""

    dtype: Literal["float32", "float64", "int64", "int32", "bool"] = Field(description="Type of its numbers.")
    shape: tuple[int, ...] = Field(description="Size of each axis.")
    trained: bool = Field(description="Whether it is a parameter.")


class GraphEyesConfig(Config):
    """Everything that fixes the computation of `GraphEyes`."""

    kind: Literal["graph"] = Field(default="graph", description="What kind of encoder it is.")
    operators: str = Field(description="The graph as JSON: one operator after the other.")
    tensors: dict[str, Stored] = Field(description="Its weights and constants by name.")
    image_size: int = Field(gt=0, le=1 << 14, description="Rows of an image in pixels.")
    image_width: int = Field(gt=0, le=1 << 14, description="Columns of an image in pixels.")
    num_channels: int = Field(gt=0, le=4, description="Channels of an image.")
    reversed_channels: bool = Field(default=False, description="Whether it takes blue first.")
    last_channels: bool = Field(default=False, description="Whether it takes images with their channels last.")
    hidden_size: int = Field(gt=0, description="Numbers of each place.")
    places: int = Field(gt=0, description="Places of an image.")
    skipped: int = Field(default=0, ge=0, description="Tokens before those of places, such as a class token.")

    keeps_norms: bool = Field(
        default=True, description="Whether batch norms keep the statistics that they came with while it is trained."
    )

    @field_validator("tensors")
    @classmethod
    def _not_too_large(cls, tensors: dict[str, Stored]) -> dict[str, Stored]:
        if sum(math.prod(each.shape) for each in tensors.values()) > MOST_NUMBERS:
            raise ValueError("more numbers than any network has")
        return tensors

    @property
    def side(self) -> int:
        """Places of a row of an image; 0 where they are no square."""
        side = math.isqrt(self.places)
        return side if side * side == self.places else 0


class GraphEyes(nn.Module):
    """Normalised images (N, channels, height, width) → (N, P, E), row by row.

    Where its batch norms keep their statistics it has no dropout either, also while it is trained.
    """

    def __init__(self, config: GraphEyesConfig) -> None:
        super().__init__()
        self.config = config
        tensors = {
            name: torch.zeros(each.shape, dtype=getattr(torch, each.dtype)) for name, each in config.tensors.items()
        }
        trained = frozenset(name for name, each in config.tensors.items() if each.trained)
        self.graph = load_graph(config.operators, tensors, "the encoder's graph", trained)

    def train(self, mode: bool = True) -> GraphEyes:
        """See the class."""
        super().train(mode)
        self.graph.train(mode and not self.config.keeps_norms)
        return self

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        config = self.config
        x = images.flip(1) if config.reversed_channels else images
        (found,) = self.graph(x.permute(0, 2, 3, 1) if config.last_channels else x)
        return _as_places(found, config.hidden_size)[:, config.skipped :]


class GraphTowerConfig(Config):
    """Everything that fixes the computation of `GraphTower`."""

    eyes: GraphEyesConfig = Field(description="The network.")
    dimension: int = Field(gt=0, description="Numbers of an image's vector.")


class GraphTower(nn.Module):
    """Normalised images (N, channels, height, width) → (N, D), of any length: the mean of all places, projected."""

    def __init__(self, config: GraphTowerConfig) -> None:
        super().__init__()
        self.eyes = GraphEyes(config.eyes)
        self.projection = nn.Linear(config.eyes.hidden_size, config.dimension, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        return self.projection(self.eyes(images).mean(1))


def _as_places(found: Tensor, hidden: int) -> Tensor:
    if found.dim() == 4 and found.shape[1] == hidden:
        return found.flatten(2).transpose(1, 2)
    return found.reshape(found.shape[0], -1, hidden)


def eyes_of(
    network: Network, where: str, node: str | None = None, *, pooled: bool = False, keeps_norms: bool = True
) -> GraphEyes:
    """The part of `network` up to one of its results, with its weights.

    Args:
        where: the network came from, for messages.
        node: whose result it is; None: the last one that has rows and columns or tokens, or with `pooled` the output.
        keeps_norms: see `GraphEyesConfig`; a network that begins anew does not.

    Raises:
        InputError: it takes no images, or has no such result.
    """
    pixels = _checked(network, where)
    network = network.copy()
    propagate(network)
    graph = network.module.graph
    chosen = _node(graph, where, node, pooled)
    shape = tuple(chosen.meta["val"].shape)
    output = next(each for each in graph.nodes if each.op == "output")
    graph.erase_node(output)
    graph.output((chosen,))
    graph.eliminate_dead_code()
    graph.lint()
    module = GraphModule(network.module, graph)
    used = {str(each.target): tensor_at(network.module, str(each.target)) for each in graph.find_nodes(op="get_attr")}
    if len({tensor.data_ptr() for tensor in used.values() if tensor.numel()}) < sum(
        tensor.numel() > 0 for tensor in used.values()
    ):
        raise InputError(f"{where} has weights with two names, which an encoder cannot have so far; take another")
    hidden, places, skipped = _form(shape)
    config = GraphEyesConfig(
        operators=dump_graph(module.graph),
        tensors={name: _stored(name, tensor, where) for name, tensor in used.items()},
        image_size=pixels.height,
        image_width=pixels.width,
        num_channels=len(pixels.mean),
        reversed_channels=pixels.order == "BGR",
        last_channels=pixels.layout == "NHWC",
        hidden_size=hidden,
        places=places,
        skipped=skipped,
        keeps_norms=keeps_norms,
    )
    eyes = GraphEyes(config)
    eyes.load_state_dict({f"graph.{name}": tensor.detach() for name, tensor in used.items()})
    return eyes


def colours_of(pixels: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of channels in the order red, green, blue, of values from 0 to 1."""
    turn = slice(None, None, -1) if pixels.order == "BGR" else slice(None)
    mean, std = (tuple(value * pixels.scale / 255 for value in each)[turn] for each in (pixels.mean, pixels.std))
    return mean, std


def _checked(network: Network, where: str) -> Pixels:
    config = network.config
    if config.pixels is None or len(config.inputs) != 1 or not config.batched:
        raise InputError(
            f"{where} takes {', '.join(map(str, config.inputs))}: an encoder of images takes any number of images, and "
            "knows how they enter; import it with a dynamic first axis and --mean and --std"
        )
    return config.pixels


def _node(graph: fx.Graph, where: str, name: str | None, pooled: bool) -> Node:
    output = next(each for each in graph.nodes if each.op == "output").args[0]
    assert isinstance(output, tuple | list)
    if name is None and pooled:
        first = output[0]
        assert isinstance(first, Node)
        if _form_or_none(first) is None:
            raise InputError(f"{where} gives {first.meta.get('val')}, no vector of each image; name a node of it")
        return first
    calls = [each for each in graph.nodes if each.op == "call_function"]
    if name is None:
        spatial = [each for each in calls if (form := _form_or_none(each)) is not None and form[1] > 1]
        if not spatial:
            raise InputError(f"{where} has no result with rows and columns or tokens; name a node of it")
        return spatial[-1]
    found = next((each for each in calls if each.name == name), None)
    if found is None or _form_or_none(found) is None:
        raise InputError(
            f"{where} has no floating result {name!r} of an image with rows and columns, tokens or one vector; "
            "'penjing graph' shows the names of all"
        )
    return found


def _form_or_none(node: Node) -> tuple[int, int, int] | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or operator_name(node) == "":
        return None
    return _form(tuple(value.shape)) if value.dim() in (2, 3, 4) and len(value) == _batch(node) else None


def _batch(node: Node) -> int:
    first = next(each for each in node.graph.nodes if each.op == "placeholder")
    return len(first.meta["val"])


def _form(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Numbers of a place, places, and tokens before them, of a result (N, …)."""
    if len(shape) == 4:
        return shape[1], shape[2] * shape[3], 0
    if len(shape) == 2:
        return shape[1], 1, 0
    tokens = shape[1]
    # One class token, one more of a distilled network, or four registers may stand before a square of patches.
    skipped = next((few for few in (0, 1, 2, 5) if tokens > few and _is_square(tokens - few)), 0)
    return shape[2], tokens - skipped, skipped


def _is_square(count: int) -> bool:
    return math.isqrt(count) ** 2 == count


def _stored(name: str, tensor: Tensor, where: str) -> Stored:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64", "int64", "int32", "bool"):
        raise InputError(f"{where}: {name} is {dtype}; an encoder has weights in float32")
    return Stored.model_validate(
        {"dtype": dtype, "shape": tuple(tensor.shape), "trained": isinstance(tensor, nn.Parameter)}
    )
