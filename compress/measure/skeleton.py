"""The networks of checkpoints and artifacts without storage, and what one run of them multiplies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.utils.flop_counter import FlopCounterMode

from penjing.compress.decoder.check import check_model
from penjing.core.artifact.base import is_artifact
from penjing.core.checkpoint.classifier import classifier_config, classifier_skeleton
from penjing.core.checkpoint.decoder import open_checkpoint
from penjing.core.checkpoint.graph import graph_skeleton
from penjing.core.checkpoint.sight import read_sight_config
from penjing.core.checkpoint.towers_config import towers_config
from penjing.core.checkpoint.vision_language import vision_language_config
from penjing.core.config import Config
from penjing.core.graph.network import operator_name
from penjing.core.models.decoder import Decoder
from penjing.core.models.encoder import Encoder
from penjing.core.models.resnet import ResNet
from penjing.core.text.text_tokenizer import encoder_config
from penjing.core.vision.graph_eyes import GraphEyesConfig
from penjing.core.vision.towers import TwoTowers
from penjing.core.vision.vision_language import VisionLanguage, VisionLanguageConfig

_WIDE = ("linear", "conv1d", "conv2d", "conv3d", "convolution", "addmm")  # the first axis of their weight are outputs
BATCH, TOKENS = 2, 16  # what the analysis runs on; sizes of 1 would be mistaken for broadcasts


@dataclass(frozen=True)
class Skeleton:
    """A network without storage (on "meta", or of fake tensors), in evaluation mode, and inputs for it: `inputs` of
    `unit`, such as "image" or "token"."""

    model: nn.Module
    example: tuple[Tensor, ...]
    inputs: int
    unit: str
    config: Config | None = None
    """What alone decides the network's layers and the example, if anything does."""

    def layers(self) -> list[Layer]:
        """`layers_of` the network: those of one config are counted once in a process, which takes longer than much
        else of a small run."""
        if self.config is None:
            return layers_of(self.model, self.example)
        key = type(self.model), self.config.model_dump_json(), self.inputs
        if key not in _counted:
            _counted[key] = layers_of(self.model, self.example)
        return _counted[key]


_counted: dict[tuple[type[nn.Module], str, int], list[Layer]] = {}


def skeleton_of_classifier(folder: Path) -> Skeleton:
    """Of an image classifier's checkpoint or artifact.

    Raises:
        InputError: damaged, or the stored tensors are not those of `config.json`.
    """
    config = classifier_config(folder)
    with torch.device("meta"):
        model = ResNet(config.model).eval() if is_artifact(folder) else classifier_skeleton(folder)[0]
        example = (torch.empty(BATCH, config.model.in_channels, *config.image_size),)
    return Skeleton(model, example, BATCH, "image", config)


def skeleton_of_decoder(folder: Path) -> Skeleton:
    """Of a decoder's checkpoint or artifact.

    Raises:
        InputError: damaged, or the stored tensors are not those of `config.json`.
    """
    checkpoint = open_checkpoint(folder)
    if not is_artifact(folder):
        check_model(checkpoint)  # sizes that the files do not bear out could be any
    with torch.device("meta"):
        model = Decoder(checkpoint.config).to("meta").eval()
        example = (torch.zeros(BATCH, TOKENS, dtype=torch.int64),)
    return Skeleton(model, example, BATCH * TOKENS, "token", checkpoint.config)


def skeleton_of_seeing(folder: Path) -> Skeleton:
    """Of the checkpoint or artifact of a decoder that sees; a question counts, of one image and some tokens.

    Raises:
        InputError: damaged, or the decoder's stored tensors are not those of `config.json`.
    """
    checkpoint = open_checkpoint(folder)
    if is_artifact(folder):
        config = read_sight_config(folder).whole(checkpoint.config)
    else:
        check_model(checkpoint)
        config = vision_language_config(folder)
    return Skeleton(*seeing_skeleton(config), BATCH, "question", config)


def seeing_skeleton(config: VisionLanguageConfig) -> tuple[VisionLanguage, tuple[Tensor, ...]]:
    """A decoder that sees without storage, and `BATCH` questions of one image each."""
    vision, length = config.vision, min(config.rows + TOKENS, config.decoder.max_position_embeddings)
    width = vision.image_width if isinstance(vision, GraphEyesConfig) else vision.image_size
    with torch.device("meta"):
        model = VisionLanguage(config).to("meta").eval()
        tokens = torch.zeros(BATCH, length, dtype=torch.int64)
        images = torch.zeros(BATCH, vision.num_channels, vision.image_size, width)
    return model, (tokens, images)


def skeleton_of_encoder(folder: Path) -> Skeleton:
    """Of a text encoder's checkpoint or artifact.

    Raises:
        InputError: damaged.
    """
    config = encoder_config(folder)
    with torch.device("meta"):
        model = Encoder(config).eval()
        tokens = torch.zeros(BATCH, TOKENS, dtype=torch.int64)
    return Skeleton(model, (tokens, tokens), BATCH * TOKENS, "token", config)


def skeleton_of_towers(folder: Path) -> Skeleton:
    """Of two towers' checkpoint or artifact; a pair of an image and a text counts.

    Raises:
        InputError: damaged.
    """
    config = towers_config(folder)
    with torch.device("meta"):
        model = TwoTowers(config).eval()
        images = torch.empty(BATCH, config.channels, *config.image_size)
        tokens = torch.zeros(BATCH, min(TOKENS, config.text.max_position_embeddings), dtype=torch.int64)
    return Skeleton(model, (images, tokens, torch.ones_like(tokens)), BATCH, "sample", config)


def skeleton_of_graph(folder: Path) -> Skeleton:
    """Of a graph's checkpoint; the example's first axis counts where it is the batch.

    Raises:
        InputError: damaged.
    """
    network = graph_skeleton(folder)
    samples = network.inputs()[0].shape[0] if network.config.batched else 1
    return Skeleton(network.module, network.inputs(), samples, "image" if network.config.pixels else "sample")


@dataclass(frozen=True)
class Layer:
    """What computes with weights of its own: a module, or an operator of a graph.

    Attributes:
        kind: the module's class, or the operator.
        shape: of its first weight.
        parameters: how many numbers are trained there.
        macs: multiply-accumulates of one run of the example.
        width: output channels or features of a linear layer or convolution, else None.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters: int
    macs: int
    width: int | None = None


def layers_of(model: nn.Module, example: tuple[Tensor, ...]) -> list[Layer]:
    """Every layer of a network, in order. Products without weights of their own, such as those of attention in a
    graph, are a layer without parameters."""
    if isinstance(model, fx.GraphModule):
        return _graph_layers(model, example)
    macs = count_macs(model, example)
    layers = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            width = own[0].shape[0] if isinstance(module, nn.Linear | nn.Conv2d) else None
            count = sum(parameter.numel() for parameter in own)
            layers.append(Layer(name, type(module).__name__, tuple(own[0].shape), count, macs.get(name, 0), width))
    return layers


def _graph_layers(model: fx.GraphModule, example: tuple[Tensor, ...]) -> list[Layer]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    macs = count_macs(model, example)
    layers, seen = [], set()
    for node in model.graph.nodes:
        read = [each.target for each in node.all_input_nodes if each.op == "get_attr" and each.target in parameters]
        if node.op != "call_function" or not (read or macs.get(node.name)):
            continue
        new = [name for name in read if name not in seen]
        seen.update(new)
        shape = tuple(parameters[read[0]].shape) if read else ()
        count = sum(parameters[name].numel() for name in new)
        kind = operator_name(node)
        width = shape[0] if kind in _WIDE and shape else None
        name = (read[0].removesuffix(".weight") if read else "") or node.name
        layers.append(Layer(name, kind, shape, count, macs.get(node.name, 0), width))
    return layers


class _Counted(fx.Interpreter):
    """Runs a graph and notes what each node multiplies."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.macs: dict[str, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            value = super().run_node(n)
        macs = counter.get_total_flops() // 2
        if operator_name(n) == "scaled_dot_product_attention":  # on a CPU it is one operation that no counter knows
            query, keys, values = (self.env[each] for each in n.args[:3] if isinstance(each, fx.Node))
            macs = query.shape[:-1].numel() * keys.shape[-2] * (query.shape[-1] + values.shape[-1])
        if macs:
            self.macs[n.name] = macs
        return value


def count_macs(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, int]:
    """Multiply-accumulates of matrix products and convolutions under each module that has weights of its own; of a
    graph those of each node."""
    if isinstance(model, fx.GraphModule):
        counted = _Counted(model)
        with detect_fake_mode(example) or nullcontext(), torch.no_grad():
            counted.run(*example)
        return counted.macs
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(*example)
    root = type(model).__name__
    return {
        name.removeprefix(f"{root}."): sum(operations.values()) // 2
        for name, operations in counter.get_flop_counts().items()
    }
